#include "torch_bridge.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

// Only CUDA builds of torch have this symbol; declared weak, the same library loads beside a
// CPU-only torch.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace moelora {
namespace {

const char* device_name(const Tensor& tensor) {
  return tensor.is_cpu() ? "cpu" : tensor.is_cuda() ? "cuda" : "another device";
}

bool is_integer(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Int || tensor.scalar_type() == ScalarType::Long;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const ShapeText& shape) {
  out << "[";
  for (int64_t d = 0; d < shape.tensor.dim(); ++d) out << (d ? ", " : "") << shape.tensor.size(d);
  return out << "]";
}

const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    default:
      return "another dtype";
  }
}

DType model_dtype(const Tensor& tensor, const char* name) {
  const ScalarType dtype = tensor.scalar_type();
  if (dtype == ScalarType::BFloat16) return DType::kBFloat16;
  if (dtype == ScalarType::Half) return DType::kFloat16;
  check_type(dtype == ScalarType::Float && tensor.is_cpu(), name, ": expected bfloat16 or float16",
             tensor.is_cpu() ? " or float32" : " on CUDA", ", got ", dtype_name(dtype));
  return DType::kFloat32;
}

ScalarType scalar_type(DType dtype) {
  return dtype == DType::kFloat32   ? ScalarType::Float
         : dtype == DType::kFloat16 ? ScalarType::Half
                                    : ScalarType::BFloat16;
}

void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> shape) {
  bool ok = tensor.dim() == static_cast<int64_t>(shape.size());
  int64_t d = 0;
  for (const int64_t size : shape) {
    ok = ok && (size < 0 || tensor.size(d) == size);
    ++d;
  }
  if (ok) return;
  std::ostringstream expected;
  d = 0;
  for (const int64_t size : shape) {
    expected << (d++ ? ", " : "");
    if (size < 0) {
      expected << "*";
    } else {
      expected << size;
    }
  }
  check_value(false, name, ": expected shape [", expected.str(), "], got ", shape_string(tensor));
}

void check_dtype(const Tensor& tensor, const char* name, ScalarType expected) {
  check_type(tensor.scalar_type() == expected, name, ": expected dtype ", dtype_name(expected),
             ", got ", dtype_name(tensor.scalar_type()));
}

void check_same_device(const Tensor& tensor, const char* name, const Tensor& reference,
                       const char* reference_name) {
  const bool same = tensor.is_cpu() == reference.is_cpu() &&
                    (tensor.is_cpu() || tensor.get_device_index() == reference.get_device_index());
  if (same) return;
  check_value(false, name, ": expected the device of ", reference_name, " (",
              device_name(reference), reference.is_cpu() ? "" : ":",
              reference.is_cpu() ? "" : std::to_string(reference.get_device_index()), "), got ",
              device_name(tensor), tensor.is_cpu() ? "" : ":",
              tensor.is_cpu() ? "" : std::to_string(tensor.get_device_index()));
}

void check_last_dim_contiguous(const Tensor& tensor, const char* name) {
  const int64_t last = tensor.dim() - 1;
  check_value(last < 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1, name,
              ": expected a contiguous last dim, got stride ", last < 0 ? 0 : tensor.stride(last));
}

void check_contiguous(const Tensor& tensor, const char* name) {
  check_value(tensor.is_contiguous(), name, ": expected a contiguous tensor of shape ",
              shape_string(tensor));
}

void check_aligned(const Tensor& tensor, const char* name) {
  if (tensor.numel() == 0) return;
  // Kernels load 16 bytes at a time. CPU code does not, and safetensors files map to 8-byte
  // aligned tensors.
  const uintptr_t bytes = tensor.is_cpu() ? 8 : 16;
  check_value(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0, name,
              ": expected a ", bytes, "-byte aligned base pointer");
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) {
    check_value(tensor.size(d) <= 1 || tensor.stride(d) % 8 == 0, name,
                ": expected outer strides that are multiples of 8 elements, got stride ",
                tensor.stride(d), " in dim ", d);
  }
}

void check_out(const Tensor& out, const char* name, std::initializer_list<int64_t> shape,
               ScalarType dtype, const Tensor& like) {
  check_shape(out, name, shape);
  check_dtype(out, name, dtype);
  check_same_device(out, name, like, "the inputs");
  check_contiguous(out, name);
}

const int32_t* int32_map(const Tensor& map, const char* name, int64_t size, const Tensor& like) {
  check_out(map, name, {size}, ScalarType::Int, like);
  return static_cast<const int32_t*>(map.const_data_ptr());
}

ByteRange::ByteRange(const Tensor& tensor)
    : begin_(reinterpret_cast<uintptr_t>(tensor.const_data_ptr())), end_(begin_) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return;
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  end_ = begin_ + static_cast<uintptr_t>((last + 1) * tensor.element_size());
}

void ByteRange::check_apart(const char* name, const Tensor& input, const char* input_name) const {
  // Most inputs lie behind, which the address alone settles.
  if (reinterpret_cast<uintptr_t>(input.const_data_ptr()) >= end_) return;
  check_value(ByteRange(input).end_ <= begin_ || begin_ == end_, name,
              ": may not overlap the bytes of ", input_name);
}

void check_no_overlap(const Tensor& out, const char* out_name, const Tensor& input,
                      const char* input_name) {
  ByteRange(out).check_apart(out_name, input, input_name);
}

IdMatrix id_matrix(const Tensor& topk_ids, const char* name, const Tensor& like) {
  check_shape(topk_ids, name, {-1, -1});
  check_type(is_integer(topk_ids), name, ": expected int32 or int64, got ",
             dtype_name(topk_ids.scalar_type()));
  check_same_device(topk_ids, name, like, "the inputs");
  const int64_t top_k = topk_ids.size(1);
  check_value(top_k >= 1 && top_k <= kMaxTopK, name, ": expected 1 to ", kMaxTopK,
              " experts per token, got ", top_k);
  const auto kind =
      topk_ids.scalar_type() == ScalarType::Long ? IdMatrix::Kind::kInt64 : IdMatrix::Kind::kInt32;
  return {topk_ids.const_data_ptr(), topk_ids.stride(0), topk_ids.stride(1), kind,
          static_cast<int32_t>(top_k)};
}

IdMatrix packed_matrix(const Tensor& packed, const char* name, const Tensor& like) {
  check_dtype(packed, name, ScalarType::Int);
  IdMatrix view = id_matrix(packed, name, like);
  view.kind = IdMatrix::Kind::kPacked;
  return view;
}

WeightMatrix weight_matrix(const Tensor& topk_weights, const char* name, const IdMatrix& ids,
                           int64_t num_tokens, const Tensor& like) {
  check_shape(topk_weights, name, {num_tokens, ids.num_cols});
  check_same_device(topk_weights, name, like, "the inputs");
  const ScalarType dtype = topk_weights.scalar_type();
  check_type(dtype == ScalarType::Float || dtype == ScalarType::BFloat16, name,
             ": expected float32 or bfloat16, got ", dtype_name(dtype));
  return {topk_weights.const_data_ptr(), topk_weights.stride(0), topk_weights.stride(1),
          dtype == ScalarType::Float ? WeightMatrix::Kind::kFloat32 : WeightMatrix::Kind::kBFloat16,
          ids.num_cols};
}

WeightMatrix unit_weights(int64_t top_k) {
  return {nullptr, 0, 0, WeightMatrix::Kind::kOne, static_cast<int32_t>(top_k)};
}

SlotView slot_view(const OptionalTensor& adapter_ids, const OptionalTensor& ranks,
                   int64_t num_slots, int64_t num_tokens, const Tensor& like) {
  SlotView view{nullptr, 0, nullptr, static_cast<int32_t>(num_slots), false};
  if (num_slots == 0) return view;
  if (ranks.has_value()) {
    check_out(*ranks, "ranks", {num_slots, 2}, ScalarType::Int, like);
    view.ranks_ptr = static_cast<const int32_t*>(ranks->const_data_ptr());
  }
  if (!adapter_ids.has_value()) {
    check_value(num_slots == 1,
                "adapter_ids: required with more than one adapter slot (L = ", num_slots, ")");
    return view;
  }
  check_shape(*adapter_ids, "adapter_ids", {num_tokens});
  check_type(is_integer(*adapter_ids), "adapter_ids: expected int32 or int64, got ",
             dtype_name(adapter_ids->scalar_type()));
  check_same_device(*adapter_ids, "adapter_ids", like, "the inputs");
  view.adapter_ids_ptr = adapter_ids->const_data_ptr();
  view.stride = adapter_ids->stride(0);
  view.ids_are_int64 = adapter_ids->scalar_type() == ScalarType::Long;
  return view;
}

RowMaps row_maps(const OptionalTensor& permuted_to_expanded, const OptionalTensor& tile_expert,
                 const OptionalTensor& tile_row_limit, const Tensor& like) {
  check_value(permuted_to_expanded.has_value() == tile_expert.has_value() &&
                  tile_expert.has_value() == tile_row_limit.has_value(),
              "permuted_to_expanded, tile_expert and tile_row_limit: give all three or none");
  if (!permuted_to_expanded.has_value()) return {nullptr, nullptr, nullptr, 0, 0};
  check_shape(*permuted_to_expanded, "permuted_to_expanded", {-1});
  check_shape(*tile_expert, "tile_expert", {-1});
  const int64_t rows = permuted_to_expanded->size(0), tiles = tile_expert->size(0);
  check_value(tiles == 0 ? rows == 0 : rows % tiles == 0,
              "permuted_to_expanded: expected a multiple of tile_expert's ", tiles, " tiles, got ",
              rows, " rows");
  return {int32_map(*permuted_to_expanded, "permuted_to_expanded", rows, like),
          int32_map(*tile_expert, "tile_expert", tiles, like),
          int32_map(*tile_row_limit, "tile_row_limit", tiles, like), tiles,
          tiles == 0 ? 0 : static_cast<int32_t>(rows / tiles)};
}

Tensor new_tensor(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType dtype) {
  const std::vector<int64_t> sizes(shape);
  return torch::stable::empty(sizes, dtype, std::nullopt, like.device());
}

void* current_stream(const Tensor& tensor) {
  check_value(aoti_torch_get_current_cuda_stream != nullptr,
              "this torch is a CPU-only build: CUDA tensors cannot be used");
  void* stream = nullptr;
  check_value(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == 0,
              "torch gave no current CUDA stream");
  return stream;
}

DeviceScope::DeviceScope(const Tensor& tensor) {
  if (tensor.is_cuda()) guard_.emplace(tensor.get_device_index());
}

}  // namespace moelora
