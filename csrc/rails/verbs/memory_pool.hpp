// Memory that every RDMA device of the process may read and its peers write: slots, staging, rings,
// and buffers of callers that asked for it.  Not for concurrent use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "drivers/verbs.hpp"
#include "link/link_types.hpp"
#include "r2ccl/errors.hpp"

namespace r2ccl {

class MemoryPool final : public StreamMemory {
 public:
  MemoryPool() = default;
  ~MemoryPool() override;
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // Everything here is registered with the device, too.  One of the same name takes the place of
  // the other, which is gone.
  Status add_device(std::shared_ptr<VerbsDevice> device);

  // Null: last_error() says why.
  std::byte* allocate(std::size_t bytes) override;
  void release(std::byte* memory) override;
  [[nodiscard]] const std::string& last_error() const { return last_error_; }

  // A caller's buffer; as often as it is registered it has to be given back.
  Status register_buffer(std::span<std::byte> buffer);
  // The memory may be freed then, if no rail reads it any more.  False: it is not registered.
  bool deregister_buffer(const std::byte* buffer);

  struct Keys {
    std::uint32_t local = 0;
    std::uint32_t remote = 0;
  };
  // Of all these bytes for the device; empty: they are not registered with it.
  [[nodiscard]] std::optional<Keys> find(const std::string& device, const std::byte* data,
                                         std::size_t bytes) const;

  [[nodiscard]] std::size_t registered_bytes() const { return registered_bytes_; }

 private:
  struct Region {
    std::size_t bytes = 0;
    unsigned users = 1;
    bool own = true;                                           // mapped here
    std::map<std::string, std::unique_ptr<VerbsMemory>> with;  // by device
  };

  Status share(std::byte* at, Region& region, VerbsDevice& device);
  Status share_with_all(std::byte* at, Region& region);

  std::map<std::string, std::shared_ptr<VerbsDevice>> devices_;
  std::map<const std::byte*, Region> regions_;
  std::multimap<std::size_t, std::byte*> free_;  // by size: registering is slow
  std::size_t registered_bytes_ = 0;
  std::string last_error_;
};

}  // namespace r2ccl
