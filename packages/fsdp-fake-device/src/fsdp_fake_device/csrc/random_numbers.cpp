#include "random_numbers.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include <cstring>
#include <vector>

namespace fake_device {
namespace {

constexpr int64_t kStateBytes = 16;

// The state is a seed and an offset, a multiple of 4, as CUDA's: DTensor reads and writes both.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kFake, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % 4 == 0, "offset must be a multiple of 4, and is ", offset);
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.is_cpu() && state.dtype() == at::kByte && state.numel() == kStateBytes && state.is_contiguous(),
                "RNG state must be a torch.ByteTensor of ", kStateBytes, " bytes on the CPU");
    std::memcpy(&seed_, state.data(), sizeof seed_);
    std::memcpy(&offset_, static_cast<const char*>(state.data()) + sizeof seed_, sizeof offset_);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    // not at::empty(): a mode of the caller may make meta tensors of those
    auto state = at::detail::empty_cpu({kStateBytes}, at::kByte);
    std::memcpy(state.data_ptr(), &seed_, sizeof seed_);
    std::memcpy(static_cast<char*>(state.data_ptr()) + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
  }

  uint64_t draw() {
    std::lock_guard lock(mutex_);
    offset_ += 4;
    uint64_t bits = seed_ * 0x9E3779B97F4A7C15ull + offset_;  // splitmix64's mixing
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    return bits ^ (bits >> 31);
  }

 private:
  Generator* clone_impl() const override {
    auto* clone = new Generator(device().index());
    clone->seed_ = seed_;
    clone->offset_ = offset_;
    return clone;
  }

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int index = 0; index < settings().devices; ++index) generators->push_back(make_generator(index));
    return generators;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator make_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : device);
}

uint64_t draw_seed(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kFake, "Expected a 'fake' device type for generator but found '",
              c10::DeviceTypeName(generator.device().type(), true), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->draw();
}

at::Generator make_cpu_generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

}  // namespace fake_device
