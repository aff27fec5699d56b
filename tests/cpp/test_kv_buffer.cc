// The KV buffer of a model whose layers are not all of one kind.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "catch.h"
#include "kv_buffer.h"
#include "schedule.h"

namespace {

using Floats = std::vector<float>;

// Four layers: keys and values, linear attention instead, keys and values of other sizes, and one that reads the first layer's.
skd::Model Hybrid() {
  skd::Model model{};
  model.num_layers = 4;
  model.num_kv_heads = 2;
  model.head_size = 4;
  model.state_layers = {{{1}, std::nullopt, std::nullopt, {{"conv_state", {6, 3}}, {"recurrent_state", {2, 4, 5}}}},
                        {{2}, skd::KeyValueSizes{1, 6}, std::nullopt, {}},
                        {{3}, std::nullopt, 0, {}}};
  return model;
}

class Buffer {
 public:
  explicit Buffer(std::vector<int64_t> slots, int64_t rows = 3) : kv_(memory_, Hybrid(), std::move(slots), rows) {}
  skd::KvBuffer& kv() { return kv_; }
  std::vector<skd::Tensor> Inputs(int64_t layer, int64_t row, int64_t rows = 1) {
    skd::Bindings bound;
    kv_.Bind(layer, row, rows, &bound);
    return bound.inputs;
  }
  void Fill(int64_t row, float value) {
    for (int64_t layer = 0; layer < 3; ++layer) {
      for (const skd::Tensor& tensor : Inputs(layer, row)) {
        std::fill_n(static_cast<float*>(tensor.data), Count(tensor), value);
      }
    }
  }
  // A row of one array; each layer has two, 0 and 1.
  Floats Row(int64_t layer, size_t array, int64_t row) {
    const skd::Tensor tensor = Inputs(layer, row)[array];
    const auto* first = static_cast<const float*>(tensor.data);
    return {first, first + Count(tensor)};
  }

 private:
  static int64_t Count(const skd::Tensor& tensor) {
    int64_t count = 1;
    for (const int64_t size : tensor.shape) count *= size;
    return count;
  }

  const skd::Memory memory_{skd::Device::kCpu, "float32"};
  skd::KvBuffer kv_;
};

}  // namespace

TEST_CASE("a layer's arrays have the names and shapes that its engine reads and writes in place") {
  Buffer buffer({5, 5, 0});
  skd::Bindings bound;
  for (const int64_t layer : {0, 1}) buffer.kv().Bind(layer, 1, 2, &bound);
  const std::vector<std::string> names = {"key.0", "value.0", "conv_state.1", "recurrent_state.1"};
  const std::vector<std::vector<int64_t>> shapes = {{2, 2, 5, 4}, {2, 2, 5, 4}, {2, 6, 3}, {2, 2, 4, 5}};
  REQUIRE(bound.inputs.size() == names.size());
  REQUIRE(bound.outputs.size() == names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    CHECK(bound.inputs[i].name == "past_" + names[i]);
    CHECK(bound.outputs[i].name == "present_" + names[i]);
    CHECK(bound.inputs[i].shape == shapes[i]);
    CHECK(bound.outputs[i].shape == shapes[i]);
    CHECK(bound.inputs[i].data == bound.outputs[i].data);
  }
  CHECK(buffer.kv().bytes() == 3 * 4 * (2 * 2 * 5 * 4 + 6 * 3 + 2 * 4 * 5) + 8);  // 8: arrays begin at multiples of 16
}

TEST_CASE("keys and values have the sizes of their layer, and a layer that reads another's has none") {
  Buffer buffer({5, 0, 5, 5}, 2);
  CHECK(buffer.Inputs(2, 0)[1].shape == std::vector<int64_t>{1, 1, 5, 6});
  CHECK(buffer.Inputs(3, 0).empty());
  CHECK(buffer.kv().bytes() == 2 * 4 * 2 * (2 * 5 * 4 + 5 * 6));
  CHECK(skd::KeySources(Hybrid(), {2, 3}) == std::vector<int64_t>{0});
  CHECK(skd::KeySources(Hybrid(), {0, 1, 3}).empty());
  skd::Bindings read;
  buffer.kv().BindRead(0, 1, 1, &read);
  REQUIRE(read.inputs.size() == 2);
  CHECK(read.outputs.empty());
  CHECK(read.inputs[0].name == "present_key.0");
  CHECK(read.inputs[0].data == buffer.Inputs(0, 1)[0].data);
}

TEST_CASE("a layer that no decode step computes takes no memory, not even for states") {
  Buffer buffer({0, 0, 0});
  CHECK(buffer.kv().bytes() == 0);
  CHECK_FALSE(buffer.kv().Has(1));
  buffer.kv().ClearRow(0);
  buffer.kv().CopyRow(0, 1, 5);
}

TEST_CASE("moving a row takes its valid slots and all of its states along and leaves other rows unchanged") {
  Buffer buffer({5, 2, 2});  // the last has fewer slots than the row has tokens
  for (const int64_t row : {0, 1, 2}) buffer.Fill(row, static_cast<float>(row + 1));
  buffer.kv().CopyRow(2, 0, 3);
  for (const size_t array : {0U, 1U}) {
    Floats keys = buffer.Row(0, array, 0);
    for (const int64_t head : {0, 1}) {
      CHECK(std::count(keys.begin() + head * 20, keys.begin() + head * 20 + 12, 3.0F) == 12);
      CHECK(std::count(keys.begin() + head * 20 + 12, keys.begin() + (head + 1) * 20, 1.0F) == 8);
    }
    for (const int64_t layer : {1, 2}) CHECK(buffer.Row(layer, array, 0) == buffer.Row(layer, array, 2));
    for (const int64_t layer : {0, 1, 2}) {
      const Floats other = buffer.Row(layer, array, 1);
      CHECK(std::count(other.begin(), other.end(), 2.0F) == static_cast<int64_t>(other.size()));
    }
  }
}

TEST_CASE("clearing forgets what states have accumulated of a row, and nothing else") {
  Buffer buffer({5, 5, 5});
  for (const int64_t row : {0, 1, 2}) buffer.Fill(row, 1.0F);
  buffer.kv().ClearRow(1);
  for (const int64_t row : {0, 1, 2}) {
    for (const int64_t layer : {0, 1, 2}) {
      for (const size_t array : {0U, 1U}) {
        const Floats found = buffer.Row(layer, array, row);
        CHECK(found == Floats(found.size(), row == 1 && layer == 1 ? 0.0F : 1.0F));
      }
    }
  }
}

TEST_CASE("a layer has a slot for each position that computes it, and one that no decode step computes has none") {
  using Slots = std::vector<int64_t>;
  const auto slots = [](skd::Anchor anchor, int64_t prompt, int64_t fresh) {
    return skd::SlotsPerLayer(skd::Schedule(6, 1, {5, 5, 3, 2}, anchor), prompt, fresh);
  };
  CHECK(slots(skd::Anchor::kGenerated, 7, 10) == Slots{17, 0, 9, 9, 10, 17});
  CHECK(slots(skd::Anchor::kGenerated, 7, 1) == Slots{8, 0, 8, 8, 8, 8});
  CHECK(slots(skd::Anchor::kAbsolute, 7, 10) == Slots{17, 0, 2, 2, 3, 17});
  CHECK(slots(skd::Anchor::kAbsolute, 1, 1) == Slots{2, 0, 2, 2, 2, 2});
}
