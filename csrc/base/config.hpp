// Options of the core.  r2serve/config.py documents and validates every option.  The fields here
// have the same names and defaults; a test compares the two.  Values arrive validated, so the core
// does not check again.  Options of Python alone, for example `rails`, are not here.
#pragma once

#include <cstdint>
#include <string>

#include "base/types.hpp"

namespace r2ccl {

struct Config {
  std::string ports;  // listening ports, "40000-40050" or "40000"; empty: any

  // Failover.
  bool resilience = true;           // off: no replay, no hedges, no probes
  bool fallback = true;             // without a data rail, the control rail carries data
  bool checksum = false;            // CRC32C of every chunk
  double link_timeout_s = 30.0;     // longest time without a rail to a peer; then peer_lost
  double refused_grace_s = 0.3;     // refusals for this long prove the death of a process
  double connect_timeout_s = 60.0;  // longest start-up wait until every link has a rail
  double call_timeout_s = 0.0;      // longest wait of a call for other ranks; 0 = none
  std::int64_t handshake_timeout_ms = 1000;  // limit of a connection's set-up, and of probation

  // Messages and memory.
  std::int64_t small_message_bytes = 32768;  // up to this size: 1 chunk on 1 rail
  std::int64_t chunk_bytes = 131072;
  std::int64_t slot_bytes = 1048576;
  std::int64_t slots = 8;                // per link and direction
  std::int64_t spare_slots = 4;          // replace slots in quarantine
  std::int64_t staging_bytes = 262144;   // copied up to this size; larger sends are zero-copy
  std::int64_t socket_buffer_bytes = 0;  // 0: tuned by the kernel

  // Detection and rejoin.
  std::int64_t ack_deadline_floor_ms = 20;
  double ack_deadline_factor = 8.0;  // multiple of the smoothed round trip
  std::int64_t dead_deadline_ms = 500;
  std::int64_t probe_interval_ms = 200;
  std::int64_t rejoin_backoff_min_ms = 50;
  std::int64_t rejoin_backoff_max_ms = 5000;
  double flap_half_life_s = 30.0;

  // RDMA.
  std::int64_t gid_index = -1;         // negative: chosen by rule
  std::int64_t verbs_timeout = 14;     // transport retry after 4.096 us * 2^value
  std::int64_t verbs_retry_count = 6;  // transport retries before the queue pair fails
  std::int64_t verbs_rnr_timer = 12;   // IBTA code: wait after receiver-not-ready
  std::int64_t verbs_rnr_retry = 7;    // receiver-not-ready retries; 7: unlimited
  std::int64_t traffic_class = 0;
  std::int64_t service_level = 0;
  std::int64_t pkey_index = 0;

  // Progress.
  std::int64_t spin_us = 200;               // busy-poll time before sleeping in poll()
  std::int64_t background_interval_ms = 2;  // interval of progress without a caller
  std::string background_cpus;              // "0-3,8"; empty: the process's CPUs at its start

  Algorithm algorithm = Algorithm::automatic;
  Consensus consensus = Consensus::automatic;
  std::int64_t consensus_result = 0;  // compare each N-th result; 0: none
  std::string journal_dir;            // empty: no journal file
  // Fault injection without root.  Each line: "<rail> carrier_loss|black_hole|reset|heal".
  // An empty path disables the injection.
  std::string fault_file;
};

}  // namespace r2ccl
