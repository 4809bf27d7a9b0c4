// The one place where op files meet torch: the stable-ABI Tensor, dtype and view conversions with
// their checks, the current stream, the device guard and allocation.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "checks.h"
#include "device.h"
#include "views.h"

namespace moelora {

using torch::stable::Tensor;
using ScalarType = torch::headeronly::ScalarType;
using OptionalTensor = std::optional<Tensor>;

// A tensor's shape for messages; text is made only when a check has failed.
struct ShapeText {
  const Tensor& tensor;
};
std::ostream& operator<<(std::ostream& out, const ShapeText& shape);
inline ShapeText shape_string(const Tensor& tensor) { return {tensor}; }

const char* dtype_name(ScalarType dtype);

// float32 / float16 / bfloat16 of `tensor`; check_type otherwise. float32 only on CPU.
DType model_dtype(const Tensor& tensor, const char* name);
ScalarType scalar_type(DType dtype);

// Checks that name the argument. A size of -1 in `shape` matches anything.
void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape);
void check_dtype(const Tensor& tensor, const char* name, ScalarType expected);
void check_same_device(const Tensor& tensor, const char* name, const Tensor& reference,
                       const char* reference_name);
void check_last_dim_contiguous(const Tensor& tensor, const char* name);
void check_contiguous(const Tensor& tensor, const char* name);
// 16-byte aligned base pointer (8 on CPU), and outer strides that are multiples of 8 elements (dims
// of size 1 do not count).
void check_aligned(const Tensor& tensor, const char* name);
// An output buffer: contiguous, of this shape, dtype and device, not requiring more than `like`'s
// device.
void check_out(const Tensor& out, const char* name, std::initializer_list<int64_t> shape,
               ScalarType dtype, const Tensor& like);
// An int32 map made by moe_sort: contiguous, 1-D, same device.
const int32_t* int32_map(const Tensor& map, const char* name, int64_t size, const Tensor& like);
// The bytes from the first to the last element that a tensor can touch.
class ByteRange {
 public:
  explicit ByteRange(const Tensor& tensor);
  // Raises where the range, of the output `name`, overlaps that of `input`.
  void check_apart(const char* name, const Tensor& input, const char* input_name) const;

 private:
  uintptr_t begin_, end_;
};

// Raises where the bytes of `out` overlap those of `input`.
void check_no_overlap(const Tensor& out, const char* out_name, const Tensor& input,
                      const char* input_name);

// Views of the per-token inputs. Each checks dtype, shape and device.
IdMatrix id_matrix(const Tensor& topk_ids, const char* name, const Tensor& like);
IdMatrix packed_matrix(const Tensor& packed, const char* name, const Tensor& like);
WeightMatrix weight_matrix(const Tensor& topk_weights, const char* name, const IdMatrix& ids,
                           int64_t num_tokens, const Tensor& like);
WeightMatrix unit_weights(int64_t top_k);
SlotView slot_view(const OptionalTensor& adapter_ids, const OptionalTensor& ranks,
                   int64_t num_slots, int64_t num_tokens, const Tensor& like);
RowMaps row_maps(const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                 const OptionalTensor& tile_row_limit, const Tensor& like);

Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype);

// The stream torch runs on now for `tensor`'s device, as a cudaStream_t.
void* current_stream(const Tensor& tensor);

// Makes `tensor`'s device the current one for a scope (a no-op for CPU tensors).
class DeviceScope {
 public:
  explicit DeviceScope(const Tensor& tensor);

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Runs `cpu(params)` or `launch(params, stream)` for the device that `tensor` is on.
template <class Params>
void run_on_device(const Tensor& tensor, const Params& params, void (*cpu)(const Params&),
                   void (*launch)(const Params&, void*)) {
  if (tensor.is_cpu()) return cpu(params);
  require_supported_device(tensor.get_device_index());
  DeviceScope scope(tensor);
  launch(params, current_stream(tensor));
}

}  // namespace moelora
