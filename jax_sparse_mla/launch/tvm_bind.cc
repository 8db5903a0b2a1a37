// Binds a TVM-FFI function to a fixed argument list, so that XLA's buffers are all a call passes.
//
// XLA hands a custom call its inputs, then its results. Vendor functions want them in another order, with numbers and
// absent optionals between them.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <deque>
#include <vector>

#include "kernel_launch.h"
#include "xla_call.h"

namespace {

namespace ffi = tvm::ffi;

// One of XLA's buffers as an argument: the buffer, how many rows and bytes of a row each of its pages has (0: it is
// passed as it is), and which rows of its first axis are passed (0 of them: all).
struct Place {
  int64_t buffer = -1, rows = 0, row_bytes = 0, first = 0, pages = 0;

  bool IsView() const { return rows != 0 || pages != 0; }
};

// A part of a buffer, or a buffer `[pages, page_bytes]` seen as `[pages, rows, row_bytes]`: what pads the page lies
// between two pages.
struct View {
  std::vector<int64_t> shape, strides;
  DLTensor tensor;

  View(const DLTensor& whole, const Place& place)
      : shape(whole.shape, whole.shape + whole.ndim),
        strides(whole.strides, whole.strides + whole.ndim),
        tensor(whole) {
    if (place.pages != 0) {
      TVM_FFI_CHECK(whole.ndim > 0 && place.first >= 0 && place.pages > 0 && place.first + place.pages <= shape[0],
                    ValueError)
          << "rows " << place.first << " to " << place.first + place.pages << " of a buffer of " << shape[0];
      shape[0] = place.pages;
      // Not byte_offset, which some functions do not read.
      const int64_t bytes = (whole.dtype.bits * whole.dtype.lanes + 7) / 8;
      tensor.data = static_cast<char*>(whole.data) + place.first * strides[0] * bytes;
    }
    if (place.rows != 0) {
      TVM_FFI_CHECK(whole.ndim == 2 && place.rows * place.row_bytes <= shape[1], ValueError)
          << "a page of " << shape[1] << " bytes cannot hold " << place.rows << " rows of " << place.row_bytes;
      shape = {shape[0], place.rows, place.row_bytes};
      strides = {strides[0], place.row_bytes, 1};
    }
    tensor.ndim = static_cast<int>(shape.size());
    tensor.shape = shape.data();
    tensor.strides = strides.data();
  }
};

// Each argument is a constant, or the five numbers of a Place.
ffi::Function Bind(ffi::Function function, ffi::Array<ffi::Any> arguments) {
  struct Argument {
    ffi::Any constant;
    Place place;
  };
  std::vector<Argument> bound;
  for (const ffi::Any& item : arguments) {
    Argument argument;
    if (auto place = item.as<ffi::Array<int64_t>>()) {
      argument.place = {(*place)[0], (*place)[1], (*place)[2], (*place)[3], (*place)[4]};
    } else {
      argument.constant = item;
    }
    bound.push_back(argument);
  }
  return ffi::Function::FromPacked([function, bound](const ffi::AnyView* buffers, int32_t count, ffi::Any* result) {
    std::vector<ffi::AnyView> call(bound.size());
    std::deque<View> views;  // their addresses stay
    for (size_t i = 0; i < bound.size(); ++i) {
      const Place& place = bound[i].place;
      TVM_FFI_CHECK(place.buffer < count, IndexError) << "no buffer " << place.buffer << " of " << count;
      if (place.buffer < 0) {
        call[i] = bound[i].constant;
      } else if (!place.IsView()) {
        call[i] = buffers[place.buffer];
      } else {
        views.emplace_back(*buffers[place.buffer].cast<DLTensor*>(), place);
        call[i] = &views.back().tensor;
      }
    }
    function.CallPacked(call.data(), static_cast<int32_t>(call.size()), result);
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind, Bind);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind_kernel, kernel_launch::Bind);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, xla_call::Add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(handler, xla_call::Handler);
