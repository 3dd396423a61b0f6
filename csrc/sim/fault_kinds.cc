#include "sim/fault_kinds.hpp"

namespace r2ccl::sim {
namespace {

struct KindName {
  std::string_view name;
  double FaultOptions::*chance;
};
constexpr std::array<KindName, fault_kinds> kinds{{
    {"carrier_loss", &FaultOptions::carrier_loss},
    {"carrier_loss_both_ends", &FaultOptions::carrier_loss_both_ends},
    {"black_hole", &FaultOptions::black_hole},
    {"one_way_loss", &FaultOptions::one_way_loss},
    {"egress_refused", &FaultOptions::egress_refused},
    {"ack_backlog", &FaultOptions::ack_backlog},
    {"middlebox_ack", &FaultOptions::middlebox_ack},
    {"mtu_hole", &FaultOptions::mtu_hole},
    {"lost_for_good", &FaultOptions::lost_for_good},
    {"long_outage", &FaultOptions::long_outage},
    {"reset", &FaultOptions::reset},
    {"half_open", &FaultOptions::half_open},
    {"delay", &FaultOptions::delay},
    {"slow", &FaultOptions::slow},
    {"flap", &FaultOptions::flap},
    {"flap_all", &FaultOptions::flap_all},
    {"all_down", &FaultOptions::all_down},
    {"corrupt", &FaultOptions::corrupt},
    {"late_completions", &FaultOptions::late_completions},
    {"duplicate_completion", &FaultOptions::duplicate_completion},
    {"late_landing", &FaultOptions::late_landing},
    {"phantom_success", &FaultOptions::phantom_success},
    {"slow_fence", &FaultOptions::slow_fence},
    {"endless_fence", &FaultOptions::endless_fence},
    {"lost_notice", &FaultOptions::lost_notice},
    {"late_notice", &FaultOptions::late_notice},
    {"process_pause", &FaultOptions::process_pause},
    {"clock_jump", &FaultOptions::clock_jump},
    {"process_death", &FaultOptions::process_death},
    {"node_loss", &FaultOptions::node_loss},
}};

}  // namespace

std::string_view name_of(FaultKind kind) { return kinds[static_cast<std::size_t>(kind)].name; }

double FaultOptions::of(FaultKind kind) const {
  return this->*kinds[static_cast<std::size_t>(kind)].chance;
}

void FaultOptions::set(FaultKind kind, double chance) {
  this->*kinds[static_cast<std::size_t>(kind)].chance = chance;
}

}  // namespace r2ccl::sim
