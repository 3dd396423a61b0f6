// What an operator may set.  r2serve/config.py is the table that documents and validates every
// option; the fields here have its names and its defaults (a test compares the two) and arrive
// validated, so the core does not check them again.  Options that Python acts on before the core
// starts (rails, node, management, simd, log_level) are not here.
#pragma once

#include <cstdint>
#include <string>

#include "base/types.hpp"

namespace r2ccl {

struct Config {
  // Failover.
  bool resilience = true;           // off: keep nothing for replay, hedge and probe nothing
  bool fallback = true;             // the control rail carries data when nothing else is left
  bool checksum = false;            // CRC32C of every chunk
  double link_timeout_s = 30.0;     // without any rail to a peer for longer: peer_lost
  double connect_timeout_s = 60.0;  // until every link has its first rail
  std::int64_t handshake_timeout_ms = 1000;  // for one connection to prove who it is

  // Messages and memory.
  std::int64_t small_message_bytes = 32768;  // up to this a message is one chunk on one rail
  std::int64_t chunk_bytes = 131072;
  std::int64_t slot_bytes = 1048576;
  std::int64_t slots = 8;                // per link and direction
  std::int64_t spare_slots = 4;          // stand in for slots in quarantine
  std::int64_t staging_bytes = 262144;   // up to this copied; above, sent from the caller's buffer
  std::int64_t socket_buffer_bytes = 0;  // 0: the kernel tunes them

  // Detection and rejoin.
  std::int64_t ack_deadline_floor_ms = 20;
  double ack_deadline_factor = 8.0;  // times the smoothed round trip
  std::int64_t dead_deadline_ms = 500;
  std::int64_t probe_interval_ms = 200;
  std::int64_t rejoin_backoff_min_ms = 50;
  std::int64_t rejoin_backoff_max_ms = 5000;
  double flap_half_life_s = 30.0;

  // RDMA.
  std::int64_t gid_index = -1;         // below 0: by rule
  std::int64_t verbs_timeout = 14;     // 4.096 us * 2^this until a packet is sent again
  std::int64_t verbs_retry_count = 6;  // times, before the queue pair fails
  std::int64_t verbs_rnr_timer = 12;   // IBTA's code of how long a sender waits for a receive
  std::int64_t verbs_rnr_retry = 7;    // times that it does; 7: for ever
  std::int64_t traffic_class = 0;
  std::int64_t service_level = 0;
  std::int64_t pkey_index = 0;

  // Progress.
  std::int64_t spin_us = 200;               // busy-poll before sleeping in poll()
  std::int64_t background_interval_ms = 2;  // how often the background thread looks for idle links

  Algorithm algorithm = Algorithm::automatic;
  std::string journal_dir;  // empty: no journal file
  // Drills without root: "<rail> carrier_loss|black_hole|reset|heal" a line; empty: none.
  std::string fault_file;
};

}  // namespace r2ccl
