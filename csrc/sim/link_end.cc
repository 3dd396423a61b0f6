#include "sim/link_end.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "sim/world.hpp"

namespace r2ccl::sim {

// --- connecting --------------------------------------------------------------------------------

class LinkEnd::Handshake final : public Connection::End {
 public:
  Handshake(LinkEnd& owner, RailId rail, Connection& connection)
      : owner_(owner), rail_(rail), connection_(connection), serial_(owner.next_handshake_++) {
    connection.attach(owner.side, *this);
  }

  void begin() {
    last_fenced_ = owner_.link.fenced_epoch(rail_);
    say({.type = HandshakeMessage::Type::hello, .last_fenced = last_fenced_});
  }

  void give_up() {
    connection_.close(owner_.side);
    on_broken();
  }

  // Without a word to the link.
  void abandon() {
    connection_.close(owner_.side);
    owner_.forget(this);
  }

  void on_parcel(const Parcel& parcel) override {
    const HandshakeMessage& message = parcel.handshake;
    switch (message.type) {
      case HandshakeMessage::Type::hello: return on_hello(message);
      case HandshakeMessage::Type::challenge: return on_challenge(message);
      case HandshakeMessage::Type::auth: return on_auth();
      case HandshakeMessage::Type::ready: return finish();
      case HandshakeMessage::Type::refuse: return give_up();
    }
  }
  void on_path_acked(std::uint64_t /*position*/) override {}
  void on_broken() override {
    const bool connects = owner_.side == connector_side;
    const RailId rail = rail_;
    const Epoch answered = answered_;
    LinkEnd& owner = owner_;
    owner.forget(this);
    if (connects) owner.connect_failed(rail, answered);
  }

  [[nodiscard]] RailId rail() const { return rail_; }
  [[nodiscard]] std::uint64_t serial() const { return serial_; }
  // The peer may have opened the epoch that we answered for.
  [[nodiscard]] bool answered() const { return answered_ != 0; }

 private:
  void say(const HandshakeMessage& message) {
    Parcel parcel;
    parcel.kind = Parcel::Kind::handshake;
    parcel.handshake = message;
    connection_.send(owner_.side, std::move(parcel));
  }

  void on_hello(const HandshakeMessage& message) {
    last_fenced_ = message.last_fenced;
    const auto epoch = owner_.offer(rail_, last_fenced_);
    if (!epoch.has_value()) {
      say({.type = HandshakeMessage::Type::refuse});
      return give_up();
    }
    epoch_ = *epoch;
    say({.type = HandshakeMessage::Type::challenge,
         .epoch = epoch_,
         .last_fenced = owner_.link.fenced_epoch(rail_)});
  }

  void on_challenge(const HandshakeMessage& message) {
    if (message.epoch <= last_fenced_ || message.epoch <= message.last_fenced) return give_up();
    epoch_ = answered_ = message.epoch;
    say({.type = HandshakeMessage::Type::auth});
  }

  void on_auth() {
    // Another connection of the rail may have been established in between.
    if (owner_.offer(rail_, last_fenced_) != epoch_) return give_up();
    say({.type = HandshakeMessage::Type::ready});
    finish();
  }

  void finish() {
    const RailId rail = rail_;
    const Epoch epoch = epoch_;
    Connection& connection = connection_;
    LinkEnd& owner = owner_;
    owner.forget(this);
    owner.established(rail, epoch, connection);
  }

  LinkEnd& owner_;
  const RailId rail_;
  Connection& connection_;
  const std::uint64_t serial_;
  Epoch last_fenced_ = 0;  // of the connector
  Epoch epoch_ = 0;        // on offer
  Epoch answered_ = 0;
};

LinkEnd::LinkEnd(World& in_world, int own_rank, int peer_rank, const LinkOptions& options)
    : rank(own_rank),
      peer(peer_rank),
      side(own_rank < peer_rank ? acceptor_side : connector_side),
      link(options, std::vector<RailKind>(in_world.options().rails, RailKind::sim),
           in_world.random().next()),
      world(in_world),
      rails_(in_world.options().rails) {
  link.set_observer(this);
}

LinkEnd::~LinkEnd() = default;

void LinkEnd::start() {
  link.start(world.now());
  settle();
}

void LinkEnd::start_connect(RailId rail) {
  rails_[rail].connect_at = 0;
  if (world.path(rank, peer, rail).cut()) return connect_failed(rail, 0);
  const auto same = std::find_if(handshakes_.begin(), handshakes_.end(),
                                 [rail](const auto& entry) { return entry->rail() == rail; });
  if (same != handshakes_.end()) {
    if ((*same)->answered()) return;  // about to end by itself
    (*same)->abandon();
  }
  Connection& connection = world.new_connection(rank, peer, rail);
  LinkEnd& acceptor = world.end(peer, rank);
  acceptor.add_handshake(rail, connection);
  add_handshake(rail, connection).begin();
}

LinkEnd::Handshake& LinkEnd::add_handshake(RailId rail, Connection& connection) {
  handshakes_.push_back(std::make_unique<Handshake>(*this, rail, connection));
  Handshake& added = *handshakes_.back();
  world.events().after(world.options().handshake_timeout_ns, [this, serial = added.serial()] {
    const auto found =
        std::find_if(handshakes_.begin(), handshakes_.end(),
                     [serial](const auto& entry) { return entry->serial() == serial; });
    if (found != handshakes_.end()) (*found)->give_up();
  });
  return added;
}

std::optional<Epoch> LinkEnd::offer(RailId rail, Epoch last_fenced) const {
  if (last_fenced < link.epoch(rail)) return std::nullopt;  // it has not fenced our epoch
  return std::max({link.epoch(rail), link.fenced_epoch(rail), last_fenced}) + 1;
}

void LinkEnd::established(RailId rail, Epoch epoch, Connection& connection) {
  // Whoever opens a new epoch has fenced every older one.
  link.peer_fenced(rail, link.epoch(rail), world.now());
  apply_actions();
  if (!link.rail_established(rail, epoch, world.now())) {
    connection.close(side);
    return connect_failed(rail, epoch);
  }
  rails_[rail].connect_at = 0;
  rails_[rail].open = std::make_unique<SimRail>(*this, rail, connection);
  settle();
}

void LinkEnd::connect_failed(RailId rail, Epoch answered) {
  if (answered != 0) link.never_opened(rail, answered);
  if (side == connector_side) link.connect_failed(rail, world.now());
  settle();
}

void LinkEnd::forget(const Handshake* handshake) {
  const auto found =
      std::find_if(handshakes_.begin(), handshakes_.end(),
                   [handshake](const auto& other) { return other.get() == handshake; });
  world.bury(std::move(*found));
  handshakes_.erase(found);
}

// --- progress ------------------------------------------------------------------------------------

void LinkEnd::settle() {
  for (bool moved = true; moved;) {
    moved = false;
    world.strike();
    apply_actions();
    if (!link.received_aborts().empty())
      world.deliver_aborts(rank, std::exchange(link.received_aborts(), {}));
    const RailId best = link.best_rail();
    if (best != any_rail && rails_[best].open) moved = rails_[best].open->send_one();
    for (RailId rail = 0; !moved && rail < rails_.size(); ++rail)
      if (rails_[rail].open) moved = rails_[rail].open->send_one();
  }
  world.touched(rank);
}

void LinkEnd::apply_actions() {
  auto& actions = link.actions();
  for (std::size_t i = 0; i < actions.size(); ++i) {  // acting may add further actions
    const LinkAction action = actions[i];
    RailEnd& end = rails_[action.rail];
    if (action.kind == LinkAction::Kind::connect) {
      end.connect_at = std::max(action.at, world.now());
      world.events().at(end.connect_at, [this, rail = action.rail] {
        if (rails_[rail].connect_at != 0 && rails_[rail].connect_at <= world.now())
          start_connect(rail);
      });
      continue;
    }
    if (end.open) {
      end.open->close();
      world.bury(std::move(end.open));
    }
    link.rail_closed(action.rail, action.epoch, world.now());
  }
  actions.clear();
}

void LinkEnd::tick() {
  link.tick(world.now());
  settle();
}

void LinkEnd::fail_rail(RailId rail, RailCause cause) {
  link.rail_failed(rail, link.epoch(rail), cause, world.now());
  settle();
}

void LinkEnd::connect_soon(RailId rail) {
  link.connect_soon(rail, world.now());
  settle();
}

void LinkEnd::on_rail_moved(RailId /*rail*/, RailState /*from*/, RailState /*to*/,
                            RailCause cause) {
  if (cause == RailCause::protocol)
    world.shadow().report("rank " + std::to_string(rank) + " found a frame of rank " +
                          std::to_string(peer) + " that no correct peer sends");
}

void LinkEnd::on_step(Step step, RailId rail) { world.on_step({rank, peer, step, rail}); }

}  // namespace r2ccl::sim
