#include "sim/shadow.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace r2ccl::sim {
namespace {

constexpr std::uint64_t remembered = 64;  // messages; more than the slots of any stream

std::string describe(const Shadow::Stream& stream, std::uint64_t number) {
  return "message " + std::to_string(number) + " from rank " + std::to_string(stream.from) +
         " to rank " + std::to_string(stream.to) + " of communicator " +
         std::to_string(stream.communicator);
}

}  // namespace

void Shadow::chunk_sent(const Stream& stream, const FrameHeader& header, const std::byte* payload) {
  Message& message = streams_[stream][header.number];
  if (message.chunks.empty()) message.bytes.resize(header.message_bytes);
  const std::size_t end = std::size_t{header.offset} + header.payload_bytes;
  if (message.bytes.size() != header.message_bytes || end > message.bytes.size())
    return report("I2: " + describe(stream, header.number) + " changed its size");
  if (header.payload_bytes > 0) {
    std::byte* const recorded = message.bytes.data() + header.offset;
    if (!message.chunks.contains(header.offset))
      std::memcpy(recorded, payload, header.payload_bytes);
    else if (std::memcmp(recorded, payload, header.payload_bytes) != 0)
      report("I2: " + describe(stream, header.number) + " was replayed with other bytes at " +
             std::to_string(header.offset));
  }
  message.chunks.insert(header.offset);
}

void Shadow::message_read(const Stream& stream, std::uint64_t number,
                          std::span<const std::byte> view) {
  compare("I1: ", " differs from the message sent", stream, number, view);
}

void Shadow::message_released(const Stream& stream, std::uint64_t number,
                              std::span<const std::byte> view) {
  compare("I2: ", " changed while it was read", stream, number, view);
  std::uint64_t& next = next_.try_emplace(stream, first_).first->second;
  if (number != next)
    report("I3: " + describe(stream, number) + " was consumed while message " +
           std::to_string(next) + " was due");
  ++next;
  auto& messages = streams_[stream];
  if (number > remembered)
    messages.erase(messages.begin(), messages.lower_bound(number - remembered));
}

void Shadow::compare(const std::string& invariant, const char* how, const Stream& stream,
                     std::uint64_t number, std::span<const std::byte> view) {
  const auto& messages = streams_[stream];
  const auto found = messages.find(number);
  if (found == messages.end())
    return report(invariant + describe(stream, number) + " was never sent");
  const auto& bytes = found->second.bytes;
  if (!std::equal(bytes.begin(), bytes.end(), view.begin(), view.end()))
    report(invariant + describe(stream, number) + how);
}

void Shadow::report(std::string violation) {
  if (violations_.size() < 16) violations_.push_back(std::move(violation));
}

}  // namespace r2ccl::sim
