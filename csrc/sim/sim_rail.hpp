// Moves frames between a link and one epoch of a simulated rail.
#pragma once

#include <vector>

#include "link/link.hpp"
#include "sim/connection.hpp"

namespace r2ccl::sim {

class LinkEnd;

class SimRail final : public Connection::End {
 public:
  SimRail(LinkEnd& owner, RailId rail, Connection& connection);

  // Sends the link's next frame if the transmitter is free and there is one.
  bool send_one();
  void close() { connection_.close(side_); }

  void on_parcel(const Parcel& parcel) override;
  void on_path_acked(std::uint64_t position) override;
  void on_broken() override;

 private:
  void send_payload(const OutFrame& frame);
  void take_payload(const Parcel& parcel);

  LinkEnd& owner_;
  Link& link_;
  const RailId rail_;
  const Epoch epoch_;
  const Side side_;
  Connection& connection_;
  std::uint64_t sent_ = 0;
  std::uint64_t acked_ = 0;
  bool wake_due_ = false;
};

}  // namespace r2ccl::sim
