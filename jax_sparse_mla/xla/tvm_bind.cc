// Binds a TVM-FFI function to a fixed argument list, so that XLA's buffers are all a call passes.
//
// XLA hands a custom call its inputs, then its results. Vendor functions want them in another order, with numbers and
// absent optionals between them, and numbers passed as XLA attributes would leak at every call of jax-tvm-ffi.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <deque>
#include <vector>

namespace {

namespace ffi = tvm::ffi;

// A buffer `[pages, page_bytes]` seen as `[pages, rows, row_bytes]`: what pads the page lies between two pages.
struct PagedView {
  int64_t shape[3];
  int64_t strides[3];
  DLTensor tensor;

  PagedView(const DLTensor& pages, int64_t rows, int64_t row_bytes)
      : shape{pages.shape[0], rows, row_bytes}, strides{pages.shape[1], row_bytes, 1}, tensor(pages) {
    TVM_FFI_CHECK(pages.ndim == 2 && rows * row_bytes <= pages.shape[1], ValueError)
        << "a page of " << pages.shape[1] << " bytes cannot hold " << rows << " rows of " << row_bytes;
    tensor.ndim = 3;
    tensor.shape = shape;
    tensor.strides = strides;
  }
};

// Each argument is a constant, or an array [buffer, rows, row_bytes]: the buffer itself where rows is 0, else a view.
ffi::Function Bind(ffi::Function function, ffi::Array<ffi::Any> arguments) {
  struct Argument {
    ffi::Any constant;
    int64_t buffer = -1, rows = 0, row_bytes = 0;
  };
  std::vector<Argument> bound;
  for (const ffi::Any& item : arguments) {
    Argument argument;
    if (auto place = item.as<ffi::Array<int64_t>>()) {
      argument.buffer = (*place)[0];
      argument.rows = (*place)[1];
      argument.row_bytes = (*place)[2];
    } else {
      argument.constant = item;
    }
    bound.push_back(argument);
  }
  return ffi::Function::FromPacked([function, bound](const ffi::AnyView* buffers, int32_t count, ffi::Any* result) {
    std::vector<ffi::AnyView> call(bound.size());
    std::deque<PagedView> views;  // their addresses stay
    for (size_t i = 0; i < bound.size(); ++i) {
      const Argument& argument = bound[i];
      TVM_FFI_CHECK(argument.buffer < count, IndexError) << "no buffer " << argument.buffer << " of " << count;
      if (argument.buffer < 0) {
        call[i] = argument.constant;
      } else if (argument.rows == 0) {
        call[i] = buffers[argument.buffer];
      } else {
        views.emplace_back(*buffers[argument.buffer].cast<DLTensor*>(), argument.rows, argument.row_bytes);
        call[i] = &views.back().tensor;
      }
    }
    function.CallPacked(call.data(), static_cast<int32_t>(call.size()), result);
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(bind, Bind);
