#include "bindings.h"

#include <algorithm>
#include <string>
#include <utility>

#include "error.h"

namespace skd {
namespace {

constexpr int64_t kAny = -1;

Tensor Int64s(const Memory& memory, const char* name, std::vector<int64_t> shape) {
  return memory.TensorAt(name, nullptr, std::move(shape), ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
}

Tensor Int32s(const Memory& memory, const char* name) {
  return memory.TensorAt(name, nullptr, {kAny}, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
}

Tensor Hidden(const Memory& memory, const Model& model, const char* name) {
  return memory.Floats(name, nullptr, {kAny, kAny, model.hidden_size});
}

// [V', E]: the manifest does not state the embedding's width E.
Tensor TiedWeight(const Memory& memory, const Model& model) {
  return memory.Floats(names::kTiedWeight, nullptr, {TiedRows(model), kAny});
}

std::string NameOf(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return "float32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return "float16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return "bfloat16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return "int32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return "int64";
    default:
      return "of another type";
  }
}

// "[?,?,64]"
std::string ShapeOf(const Tensor& tensor) {
  std::string text;
  for (const int64_t size : tensor.shape) text += (text.empty() ? "" : ",") + (size == kAny ? "?" : std::to_string(size));
  return "[" + text + "]";
}

std::vector<int64_t> WithRows(const StateArray& array, int64_t rows) {
  std::vector<int64_t> shape{rows};
  shape.insert(shape.end(), array.shape.begin(), array.shape.end());
  return shape;
}

bool Fits(const Tensor& found, const Tensor& wanted) {
  const auto fits = [](int64_t a, int64_t b) { return a == b || a < 0 || b < 0; };
  return found.type == wanted.type &&
         std::equal(found.shape.begin(), found.shape.end(), wanted.shape.begin(), wanted.shape.end(), fits);
}

// `kind`: "input" or "output".
void CheckEach(const std::vector<Tensor>& found, const std::vector<Tensor>& wanted, const std::string& kind,
               const std::string& where) {
  for (const Tensor& tensor : found) {
    const auto same = std::find_if(wanted.begin(), wanted.end(), [&](const Tensor& each) { return each.name == tensor.name; });
    if (same == wanted.end()) {
      throw BundleError("its " + kind + " '" + Shortened(tensor.name, 80) + "' is not one that bundle.json calls for", where);
    }
    if (Fits(tensor, *same)) continue;
    throw BundleError("its " + kind + " '" + tensor.name + "' is " + NameOf(tensor.type) + " " + ShapeOf(tensor) +
                          ", bundle.json calls for " + NameOf(same->type) + " " + ShapeOf(*same),
                      where);
  }
}

}  // namespace

int64_t TiedRows(const Model& model) { return (model.vocab_size + 7) / 8 * 8; }

ONNXTensorElementDataType TypeOf(const Memory& memory, const StateArray& array) {
  return array.has_slots ? memory.floats() : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

void Bindings::AddInPlace(const Memory& memory, const StateArray& array, std::byte* data, int64_t rows) {
  const ONNXTensorElementDataType type = TypeOf(memory, array);
  std::vector<int64_t> shape = WithRows(array, rows);
  inputs.push_back(memory.TensorAt(array.past, data, shape, type));
  outputs.push_back(memory.TensorAt(array.present, data, std::move(shape), type));
}

void Bindings::AddRead(const Memory& memory, const StateArray& array, std::byte* data, int64_t rows) {
  inputs.push_back(memory.Floats(array.present, data, WithRows(array, rows)));
}

Bindings EmbedBindings(const Memory& memory, const Model& model) {
  return {{Int64s(memory, names::kInputIds, {kAny, kAny}), Int64s(memory, names::kPositionIds, {kAny, kAny}),
           TiedWeight(memory, model)},
          {Hidden(memory, model, names::kHidden)}};
}

Bindings SegmentBindings(const Memory& memory, const Model& model, const std::vector<int64_t>& layers) {
  Bindings bindings{{Hidden(memory, model, names::kHidden), Int64s(memory, names::kPositionIds, {kAny, kAny}),
                     Int32s(memory, names::kSeqlensK), Int32s(memory, names::kTotalSequenceLength)},
                    {Hidden(memory, model, names::kHiddenOut)}};
  for (const int64_t layer : layers) {
    for (const StateArray& array : LayerState(model, layer, kAny)) bindings.AddInPlace(memory, array, nullptr, kAny);
  }
  for (const int64_t source : KeySources(model, layers)) {
    for (const StateArray& array : LayerState(model, source, kAny)) {
      if (array.has_slots) bindings.AddRead(memory, array, nullptr, kAny);
    }
  }
  return bindings;
}

Bindings HeadBindings(const Memory& memory, const Model& model) {
  return {{Hidden(memory, model, names::kHidden), Int64s(memory, names::kLast, {kAny}), TiedWeight(memory, model)},
          {memory.TensorAt(names::kLogits, nullptr, {kAny, model.vocab_size}, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)}};
}

void CheckBindings(const Engine& engine, const Bindings& wanted, const std::string& where) {
  CheckEach(engine.inputs(), wanted.inputs, "input", where);
  CheckEach(engine.outputs(), wanted.outputs, "output", where);
  for (const Tensor& output : wanted.outputs) {
    const auto& found = engine.outputs();
    if (std::any_of(found.begin(), found.end(), [&](const Tensor& each) { return each.name == output.name; })) continue;
    throw BundleError("has no output '" + output.name + "'", where);
  }
}

}  // namespace skd
