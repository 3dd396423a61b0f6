#include "device/server.hpp"

#include <string>
#include <utility>

#include "link/mutants.hpp"

namespace r2ccl::device {

Server::Server(Mailbox& mailbox, Carry carry, Flush flush)
    : mailbox_(mailbox),
      carry_(std::move(carry)),
      flush_(std::move(flush)),
      next_(load_acquire(mailbox.arrived) + 1) {}

Status Server::serve() {
  const Command command = mailbox_.commands[next_ % ring];
  // An exchange kernel that gives up still counts its collective, but writes no command.
  if (command.sequence != next_ && load_acquire(mailbox_.lost) != 0)
    return {ErrorCode::aborted, "a rank of this node gets no more results"};
  if (command.sequence != next_)
    return {ErrorCode::internal, "collective " + std::to_string(next_) +
                                     " was posted, but the mailbox has the command of " +
                                     std::to_string(command.sequence)};
  if (planted(Mutant::arrival_before_result)) store_release(mailbox_.arrived, next_);
  R2CCL_TRY(carry_(command.plan, next_));
  if (flush_) R2CCL_TRY(flush_());
  store_release(mailbox_.arrived, next_);
  ++next_;
  return {};
}

void Server::give_up(ErrorCode why) {
  if (planted(Mutant::abort_not_published)) return;
  store_release(mailbox_.abort, static_cast<std::uint32_t>(why));
}

}  // namespace r2ccl::device
