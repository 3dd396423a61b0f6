// Connections of posted messages over the engine's links; see link/posted.hpp.  A connection has
// one direction: from a PostedSender to the PostedReceiver with the same number at the peer.
//
// No call waits for the peer.  A call that cannot go on returns without a result, and is to be
// repeated.  Every call makes progress for the whole link, unless another thread holds the engine's
// lock.  The engine's background thread makes progress while no thread calls.
//
// Both ends must be open before the first message.  An error is sticky, and ends both ends.
// Messages delivered before the error can still be finished.  An end is used by a single thread at
// a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/errors.hpp"
#include "engine/engine.hpp"
#include "link/posted.hpp"

namespace r2ccl {

class PostedChannel {
 public:
  PostedChannel(const PostedChannel&) = delete;
  PostedChannel& operator=(const PostedChannel&) = delete;

  // Ends the connection.  Messages under way are lost, and are an error at the peer, as well as a
  // peer's wait for a later message.  Returns an error if rails still access memory of the caller
  // after `limit_s`.
  Status close(double limit_s);
  [[nodiscard]] ConnectionId id() const { return id_; }
  [[nodiscard]] const std::string& peer_label() const { return peer_->label; }

  // ---- called by the engine, with its lock held ----
  void on_abort(const AbortNotice& notice);
  void fail(ErrorCode code, const std::string& text);  // the first error counts

 protected:
  // The engine's lock, unless another thread holds the lock or waits for it.
  class Turn {
   public:
    explicit Turn(Engine& engine) : engine_(engine), held_(engine.try_lock()) {}
    ~Turn() {
      if (held_) engine_.unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    [[nodiscard]] bool held() const { return held_; }

   private:
    Engine& engine_;
    const bool held_;
  };

  PostedChannel(std::shared_ptr<Engine> engine, Peer& peer, ConnectionId id);
  ~PostedChannel();

  static Result<Peer*> find(Engine& engine, std::uint32_t process, ConnectionId id);
  [[nodiscard]] Posted& posted() const { return peer_->link.posted(); }
  [[nodiscard]] Status failure() const;  // ok while there is none
  [[nodiscard]] bool is_open() const { return !closed_; }
  // Makes progress for the link.  Arrivals are likely on the inbound rail and on `likely`; the
  // other rails are read now and then.
  void advance(RailId likely, TimeNs now);
  // Fails if the peer or the last rail is lost.
  Status check(TimeNs now);
  // Ends the use of the caller's memory.  Returns false if an RDMA rail is not fenced yet.
  [[nodiscard]] virtual bool release(TimeNs now) = 0;
  // Returns true if the peer is known to wait for a message.
  [[nodiscard]] virtual bool awaited() const { return false; }

  const std::shared_ptr<Engine> engine_;
  Peer* const peer_;
  const ConnectionId id_;
  std::uint64_t unfinished_ = 0;  // messages posted and not finished

 private:
  void fail_here(ErrorCode code, const std::string& text, bool tell_peer);

  ErrorCode failed_ = ErrorCode::ok;
  std::string why_;
  bool closed_ = false;
  unsigned rounds_ = 0;
};

class PostedSender final : public PostedChannel {
 public:
  // Opens the sending end.  The peer must be added to the engine, for posted messages.
  static Result<std::unique_ptr<PostedSender>> open(const std::shared_ptr<Engine>& engine,
                                                    std::uint32_t process, ConnectionId id);
  ~PostedSender();

  // Sends a message and returns its number, counted from 0.  Empty: call again, since the peer has
  // not posted the receive, or too many sends are not finished.  The source must stay valid until
  // sent() returns true.  invalid_argument: the message is larger than its receive.
  Result<std::optional<std::uint64_t>> send(std::span<const std::byte> source);
  // Finishes a send: returns true once the peer has the message and no rail reads the source.  Call
  // until true, and not again.
  Result<bool> sent(std::uint64_t number);
  // No rail reads the memory any more.  A send from this memory that is not finished ends the
  // connection.
  Status withdraw(std::span<const std::byte> memory);

 private:
  PostedSender(std::shared_ptr<Engine> engine, Peer& peer, ConnectionId id)
      : PostedChannel(std::move(engine), peer, id) {}
  [[nodiscard]] bool finish(std::uint64_t number, TimeNs now);
  [[nodiscard]] bool release(TimeNs now) override;
  [[nodiscard]] bool awaited() const override { return posted().room(id_).has_value(); }
};

class PostedReceiver final : public PostedChannel {
 public:
  static Result<std::unique_ptr<PostedReceiver>> open(const std::shared_ptr<Engine>& engine,
                                                      std::uint32_t process, ConnectionId id);
  ~PostedReceiver();

  // Makes memory known to the peer.  Memory may belong to several connections.  A receive that
  // waits for its message when its memory is removed ends the connection.
  Result<MemoryId> add_memory(std::span<std::byte> memory);
  Status remove_memory(MemoryId id);
  // Posts the receive of the next message and returns its number, counted from 0.  Empty: call
  // again, since too many receives are not finished, or the connection has failed and messages
  // that have arrived are not finished yet.
  Result<std::optional<std::uint64_t>> receive(const PostedMemory& into);
  // Finishes a receive: returns the size of the message once the message is there.  Call until
  // then, and not again.
  Result<std::optional<std::uint32_t>> received(std::uint64_t number);

 private:
  PostedReceiver(std::shared_ptr<Engine> engine, Peer& peer, ConnectionId id)
      : PostedChannel(std::move(engine), peer, id) {}
  [[nodiscard]] std::optional<std::uint32_t> finish(std::uint64_t number);
  [[nodiscard]] bool release(TimeNs now) override;

  RailId home_ = any_rail;  // of the last receive
};

}  // namespace r2ccl
