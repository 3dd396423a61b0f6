#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "device/direct_memory.hpp"
#include "device/stream_communicator.hpp"
#include "drivers/ibverbs.hpp"

// Buffers and streams are passed as addresses: r2serve/device.py has checked shape, dtype and
// contiguity.
namespace r2ccl::bindings {
namespace {

using cuda::Address;
using device::StreamCommunicator;
using Counts = std::vector<std::size_t>;
using StreamHandle = std::uintptr_t;

cuda::Stream at(StreamHandle stream) {
  return reinterpret_cast<cuda::Stream>(stream);  // NOLINT(performance-no-int-to-ptr)
}

// Enqueues a collective without the GIL: a launch blocks while too many launches are queued.
template <typename Call>
void enqueue(Call call) {
  Status status;
  {
    const nb::gil_scoped_release release;
    status = call();
  }
  raise_if_failed(status);
}

std::unique_ptr<StreamCommunicator> make(Communicator& communicator, const std::string& library,
                                         int device, std::uint64_t staging_bytes,
                                         Communicator* inter_node,
                                         std::vector<std::vector<int>> nodes,
                                         const std::string& direct, std::uint64_t direct_bytes) {
  device::StreamOptions options;
  options.library = library;
  options.device = device;
  options.staging_bytes = staging_bytes;
  options.node = {inter_node, std::move(nodes)};
  using Use = device::DirectOptions::Use;
  options.direct = {direct == "off"  ? Use::never
                    : direct == "on" ? Use::always
                                     : Use::where_possible,
                    direct_bytes};
  // create() exchanges data with the other ranks, which may be threads of this process: release the
  // GIL.
  return value_or_raise([&] {
    const nb::gil_scoped_release release;
    return StreamCommunicator::create(communicator, options);
  }());
}

nb::dict slots_of(const StreamCommunicator& self) {
  raise_if_failed(self.check_origin());
  const StreamCommunicator::Slots slots = self.slots();
  nb::dict made;
  made["ring"] = device::ring;
  made["base"] = slots.base;
  made["direct_base"] = slots.direct_base;
  made["direct_from"] = slots.direct_from;
  made["entry_bytes"] = slots.entry_bytes;
  made["most_bytes"] = slots.most_bytes;
  made["sequence"] = slots.sequence;
  made["arrived"] = reinterpret_cast<std::uintptr_t>(slots.arrived);
  made["abort"] = reinterpret_cast<std::uintptr_t>(slots.abort);
  return made;
}

// Returns the reason why GPU memory cannot be registered with these RDMA devices; empty if
// registration works.
std::string why_not_direct(const std::string& library, int device,
                           const std::vector<std::string>& rdma) {
  const nb::gil_scoped_release release;
  std::shared_ptr<VerbsDriver> driver;
  if (!rdma.empty()) {
    auto loaded = load_ibverbs();
    if (!loaded.ok()) return loaded.take_status().message();
    driver = std::move(loaded.value());
  }
  const Status status =
      device::probe_direct(library, device, device::kernel_image(), driver.get(), rdma);
  return status.ok() ? std::string() : status.message();
}

nb::list gpus(const std::string& library) {
  auto described = cuda::describe_all(library);
  if (!described.ok()) raise_if_failed(described.take_status());
  nb::list made;
  for (const cuda::Description& gpu : described.value()) {
    nb::dict one;
    one["name"] = gpu.name;
    one["major"] = gpu.major;
    one["minor"] = gpu.minor;
    one["dma_buf"] = gpu.dma_buf;
    made.append(one);
  }
  return made;
}

}  // namespace

void register_device(nb::module_& module) {
  module.def("gpus", &gpus, nb::arg("library"),
             "Describes the GPUs of a CUDA driver, in the driver's order.");
  module.def(
      "why_not_direct", &why_not_direct, nb::arg("library"), nb::arg("device"), nb::arg("rdma"),
      "Returns the reason why GPU memory cannot be registered with these RDMA devices, or an "
      "empty text.");
  module.def("has_kernels", [] { return !device::kernel_image().empty(); });
  nb::class_<StreamCommunicator>(
      module, "StreamCommunicator",
      "Runs collectives on GPU memory, in the order of the GPU's streams.")
      .def(nb::new_(&make), nb::arg("communicator"), nb::arg("library"), nb::arg("device"),
           nb::arg("staging_bytes"), nb::arg("inter_node").none(), nb::arg("nodes"),
           nb::arg("direct"), nb::arg("direct_bytes"))
      .def("exchange",
           [](const StreamCommunicator& self) {
             raise_if_failed(self.check_origin());
             const Status& status = self.exchange();
             return status.ok() ? std::string() : status.message();
           })
      .def("direct",
           [](const StreamCommunicator& self) {
             raise_if_failed(self.check_origin());
             const Status& status = self.direct();
             return status.ok() ? std::string() : status.message();
           })
      .def("all_reduce",
           [](StreamCommunicator& self, StreamHandle stream, Address in, Address out,
              std::size_t count, std::uint8_t dtype, std::uint8_t op, std::uint8_t algorithm) {
             enqueue([&] {
               return self.all_reduce(at(stream), in, out, count, static_cast<DType>(dtype),
                                      static_cast<ReduceOp>(op), static_cast<Algorithm>(algorithm));
             });
           })
      .def("all_gatherv",
           [](StreamCommunicator& self, StreamHandle stream, Address in, Address out,
              const Counts& counts, std::uint8_t dtype) {
             enqueue([&] {
               return self.all_gatherv(at(stream), in, out, counts, static_cast<DType>(dtype));
             });
           })
      .def("reduce_scatterv",
           [](StreamCommunicator& self, StreamHandle stream, Address in, Address out,
              const Counts& counts, std::uint8_t dtype, std::uint8_t op) {
             enqueue([&] {
               return self.reduce_scatterv(at(stream), in, out, counts, static_cast<DType>(dtype),
                                           static_cast<ReduceOp>(op));
             });
           })
      .def("broadcast",
           [](StreamCommunicator& self, StreamHandle stream, Address data, std::size_t count,
              std::uint8_t dtype, int root) {
             enqueue([&] {
               return self.broadcast(at(stream), data, count, static_cast<DType>(dtype), root);
             });
           })
      .def("gather",
           [](StreamCommunicator& self, StreamHandle stream, Address in, Address out,
              const Counts& counts, std::uint8_t dtype, int root) {
             enqueue([&] {
               return self.gather(at(stream), in, out, counts, static_cast<DType>(dtype), root);
             });
           })
      .def("all_to_all",
           [](StreamCommunicator& self, StreamHandle stream, Address in, Address out,
              std::size_t count, std::uint8_t dtype) {
             enqueue([&] {
               return self.all_to_all(at(stream), in, out, count, static_cast<DType>(dtype));
             });
           })
      .def("send",
           [](StreamCommunicator& self, StreamHandle stream, Address data, std::size_t count,
              std::uint8_t dtype, int peer) {
             enqueue([&] {
               return self.send_to(at(stream), data, count, static_cast<DType>(dtype), peer);
             });
           })
      .def("recv",
           [](StreamCommunicator& self, StreamHandle stream, Address data, std::size_t count,
              std::uint8_t dtype, int peer) {
             enqueue([&] {
               return self.receive_from(at(stream), data, count, static_cast<DType>(dtype), peer);
             });
           })
      .def("barrier",
           [](StreamCommunicator& self, StreamHandle stream) {
             enqueue([&] { return self.barrier(at(stream)); });
           })
      .def("gather_slots",
           [](StreamCommunicator& self, StreamHandle stream, Address in, std::size_t count,
              std::uint8_t dtype) {
             enqueue([&] {
               return self.gather_slots(at(stream), in, count, static_cast<DType>(dtype));
             });
           })
      .def("begin_step",
           [](StreamCommunicator& self, StreamHandle stream, std::uint32_t step,
              const std::string& about, bool compare) {
             enqueue([&] { return self.begin_step(at(stream), step, about, compare); });
           })
      .def("end_step",
           [](StreamCommunicator& self, StreamHandle stream) {
             enqueue([&] { return self.end_step(at(stream)); });
           })
      .def("compare_captures",
           [](StreamCommunicator& self) {
             raise_if_failed(self.check_origin());
             self.compare_captures();
           })
      .def("steps_ended", &StreamCommunicator::steps_ended,
           nb::call_guard<nb::gil_scoped_release>())
      .def("slots", &slots_of, "Returns addresses and sizes of the slots, by name.")
      .def(
          "check",
          [](StreamCommunicator& self, std::uint64_t steps) {
            enqueue([&] { return self.await_steps(steps); });
          },
          "Waits until `steps` ended steps were compared; raises the error that ended this "
          "communicator, if any.")
      .def("wake", [](StreamCommunicator& self) { enqueue([&] { return self.wake(); }); })
      .def("close", [](StreamCommunicator& self) {
        enqueue([&] {
          self.close();
          return Status();
        });
      });
}

}  // namespace r2ccl::bindings
