#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "base/sites.hpp"
#include "bindings.hpp"
#include "engine/communicator.hpp"

// Buffers are passed as addresses: communicator.py has checked shape, dtype and contiguity, and
// keeps the tensors alive during the call.
namespace r2ccl::bindings {
namespace {

using Address = std::uintptr_t;
using Counts = std::vector<std::size_t>;

std::byte* at(Address address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// Runs a collective without the GIL, then raises its error with the GIL held.  An exception of the
// core fails the communicator on every rank.
template <typename Call>
void collective(Communicator& self, Call call) {
  Status status;
  {
    const nb::gil_scoped_release release;
    try {
      status = call();
    } catch (const std::exception& error) {
      status = {ErrorCode::internal, std::string("exception in a call: ") + error.what()};
      self.abort(status.message());
    }
  }
  raise_if_failed(status);
}

Simd simd_of(const std::string& name) {
  if (name == "auto") return best_simd();
  for (const auto simd : {Simd::portable, Simd::avx2, Simd::avx512}) {
    if (name != name_of(simd)) continue;
    if (simd <= best_simd()) return simd;
    throw nb::value_error(("R2CCL_SIMD: this processor has no " + name + "; its best is " +
                           std::string(name_of(best_simd())))
                              .c_str());
  }
  throw nb::value_error(("R2CCL_SIMD: unknown value " + name).c_str());
}

std::unique_ptr<Communicator> make_communicator(const std::shared_ptr<Engine>& engine,
                                                std::uint64_t id, const std::string& name, int rank,
                                                const std::vector<std::uint32_t>& processes,
                                                const std::vector<int>& nodes,
                                                const std::string& simd) {
  if (processes.size() != nodes.size())
    throw nb::value_error("nodes: needs as many entries as processes");
  std::vector<Communicator::Member> members;
  for (std::size_t i = 0; i < processes.size(); ++i) members.push_back({processes[i], nodes[i]});
  return value_or_raise(Communicator::create(engine, id, name, rank, members, simd_of(simd)));
}

}  // namespace

void register_communicator(nb::module_& module) {
  module.def("set_next_site", &set_next_site, nb::arg("site"),
             "Sets the site of this thread's next call that all ranks make together.");
  module.def("note_site", &note_site, nb::arg("site"), nb::arg("text"),
             "Stores the text of a site, for errors.");
  nb::class_<Communicator>(module, "Communicator",
                           "Runs collectives of a group of ranks on host memory.")
      .def(nb::new_(&make_communicator), nb::arg("engine"), nb::arg("id"), nb::arg("name"),
           nb::arg("rank"), nb::arg("processes"), nb::arg("nodes"), nb::arg("simd"))
      .def("all_reduce",
           [](Communicator& self, Address in, Address out, std::size_t count, std::uint8_t dtype,
              std::uint8_t op, std::uint8_t algorithm) {
             collective(self, [&] {
               return self.all_reduce(at(in), at(out), count, static_cast<DType>(dtype),
                                      static_cast<ReduceOp>(op), static_cast<Algorithm>(algorithm));
             });
           })
      .def("all_gatherv",
           [](Communicator& self, Address in, Address out, const Counts& counts,
              std::uint8_t dtype) {
             collective(self, [&] {
               return self.all_gatherv(at(in), at(out), counts, static_cast<DType>(dtype));
             });
           })
      .def("reduce_scatterv",
           [](Communicator& self, Address in, Address out, const Counts& counts, std::uint8_t dtype,
              std::uint8_t op) {
             collective(self, [&] {
               return self.reduce_scatterv(at(in), at(out), counts, static_cast<DType>(dtype),
                                           static_cast<ReduceOp>(op));
             });
           })
      .def("broadcast",
           [](Communicator& self, Address data, std::size_t count, std::uint8_t dtype, int root) {
             collective(self, [&] {
               return self.broadcast(at(data), count, static_cast<DType>(dtype), root);
             });
           })
      .def("gather",
           [](Communicator& self, Address in, Address out, const Counts& counts, std::uint8_t dtype,
              int root) {
             collective(self, [&] {
               return self.gather(at(in), at(out), counts, static_cast<DType>(dtype), root);
             });
           })
      .def("all_to_allv",
           [](Communicator& self, Address in, const Counts& in_counts, Address out,
              const Counts& out_counts, std::uint8_t dtype) {
             collective(self, [&] {
               return self.all_to_allv(at(in), in_counts, at(out), out_counts,
                                       static_cast<DType>(dtype));
             });
           })
      .def("send",
           [](Communicator& self, Address data, std::size_t count, std::uint8_t dtype, int peer) {
             collective(self, [&] {
               return self.send_to(at(data), count, static_cast<DType>(dtype), peer);
             });
           })
      .def("recv",
           [](Communicator& self, Address data, std::size_t count, std::uint8_t dtype, int peer) {
             collective(self, [&] {
               return self.receive_from(at(data), count, static_cast<DType>(dtype), peer);
             });
           })
      .def("post_position",
           [](Communicator& self) { collective(self, [&] { return self.post_position(); }); })
      .def(
          "begin_step",
          [](Communicator& self, std::uint32_t step, const std::string& about, bool compare) {
            collective(self, [&] { return self.begin_step(step, about, compare); });
          },
          nb::arg("step"), nb::arg("about"), nb::arg("compare"))
      .def("end_step",
           [](Communicator& self) { collective(self, [&] { return self.end_step(); }); })
      .def("barrier", [](Communicator& self) { collective(self, [&] { return self.barrier(); }); })
      .def(
          "abort",
          [](Communicator& self, const std::string& text) {
            collective(self, [&] {
              R2CCL_TRY(self.check_origin());
              self.abort(text);
              return Status();
            });
          },
          nb::arg("text"))
      .def(
          "close",
          [](Communicator& self, double linger_s) {
            collective(self, [&] {
              self.close(linger_s);
              return Status();
            });
          },
          nb::arg("linger_s"));
}

}  // namespace r2ccl::bindings
