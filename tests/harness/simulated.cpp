// The device "simulated": real storages, streams and events whose memory is the host's, for tests without hardware.
//
// Operators run at once, on the host, on the same memory (`run`): so their numbers are the CPU's. What they touched, on
// which stream, and every event, allocation and synchronisation is reported to Python (`Told`), which keeps the clocks.
// Compiled by tests/harness/simulated.py; includes no more of torch than it needs, since that is what takes the time.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

// Bytes [start, stop) from `base`, the beginning of an allocation; `device`: -1 of the host's memory.
struct Access { uintptr_t base; int64_t start, stop; int32_t writes, device; };
// Called after each operator: messages run some operators later (nccl.cpp).
void (*simulated_heard)() = nullptr;

namespace {

constexpr int kDevices = 8;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// ---- what Python is told ----
struct Told {
  // `device` -1: page-locked memory of the host.
  void (*allocated)(uintptr_t, int64_t, int32_t device, int64_t stream);
  void (*freed)(uintptr_t, int64_t, int32_t device);
  void (*ran)(const char* op, const Access*, int32_t count, int32_t device, int64_t stream);
  void (*recorded)(int64_t event, int32_t device, int64_t stream);
  void (*waited)(int64_t event, int32_t device, int64_t stream);
  // `kind`: 0 a stream, 1 an event, 2 the device.
  void (*synchronized)(int32_t kind, int64_t which, int32_t device);
  // Whether the event is over; -1: nobody may ask now, because a graph is being captured.
  int32_t (*queried)(int64_t event);
  // Another stream than its own uses an allocation: the memory goes back when that is over (`record_stream`).
  void (*used)(uintptr_t, int32_t device, int64_t stream);
};
Told told{};
// Calls of Python under way, on all threads.
std::atomic<int> calls{0};
template <auto kind, typename... Args>
auto call(Args... args) -> decltype((told.*kind)(args...)) {
  struct Call {
    Call() { ++calls; }
    ~Call() { --calls; }
  } under_way;
  auto function = told.*kind;
  using Result = decltype(function(args...));
  return function ? function(args...) : Result();
}

// ---- streams ----
thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_stream[kDevices] = {};
std::atomic<int64_t> streams_made{0};
std::atomic<int64_t> events_made{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = current_device;
    if (d.index() >= 0) current_device = d.index();
    return {kType, old};
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device d) const override { if (d.index() >= 0) current_device = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  c10::Stream getStream(c10::Device d) const override {
    auto i = d.index() < 0 ? current_device : d.index();
    return c10::Stream(c10::Stream::UNSAFE, {kType, i}, current_stream[i]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    auto i = d.index() < 0 ? current_device : d.index();
    return c10::Stream(c10::Stream::UNSAFE, {kType, i}, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    auto i = d.index() < 0 ? current_device : d.index();
    return c10::Stream(c10::Stream::UNSAFE, {kType, i}, ++streams_made);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto i = s.device_index();
    auto old = current_stream[i];
    current_stream[i] = s.id();
    return c10::Stream(c10::Stream::UNSAFE, {kType, i}, old);
  }
  // Without "override": torch 2.10 does not ask for it.
  void* getStreamNativeHandle(const c10::Stream s) const { return reinterpret_cast<void*>(s.id()); }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++events_made);
    call<&Told::recorded>(reinterpret_cast<int64_t>(*event), s.device_index(), s.id());
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) call<&Told::waited>(reinterpret_cast<int64_t>(event), s.device_index(), s.id());
  }
  bool queryEvent(void* event) const override {
    auto over = !event || !told.queried ? 1 : call<&Told::queried>(reinterpret_cast<int64_t>(event));
    TORCH_CHECK(over >= 0, "operation not permitted when stream is capturing");
    return over;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    call<&Told::used>(reinterpret_cast<uintptr_t>(data.get()), s.device_index(), s.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& s) const override {
    call<&Told::synchronized>(0, s.id(), s.device_index());
  }
  void synchronizeEvent(void* event) const override {
    call<&Told::synchronized>(1, reinterpret_cast<int64_t>(event), current_device);
  }
  void synchronizeDevice(const c10::DeviceIndex i) const override {
    call<&Told::synchronized>(2, 0, i);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- memory ----
struct Block { void* data; int64_t nbytes; c10::DeviceIndex device; };
void release(void* context) {
  auto* block = static_cast<Block*>(context);
  call<&Told::freed>(reinterpret_cast<uintptr_t>(block->data), block->nbytes, block->device);
  std::free(block->data);
  delete block;
}
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, {kType, current_device}};
    auto* block = new Block{std::aligned_alloc(64, (nbytes + 63) / 64 * 64), static_cast<int64_t>(nbytes), current_device};
    std::memset(block->data, 0xFF, nbytes);  // NaN in every floating dtype
    call<&Told::allocated>(reinterpret_cast<uintptr_t>(block->data), nbytes, current_device, current_stream[current_device]);
    return {block->data, block, &release, {kType, current_device}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

std::mutex pinned_lock;
std::unordered_set<void*> pinned_pointers;
struct Pinned final : c10::Allocator {
  static void drop(void* p) {
    call<&Told::freed>(reinterpret_cast<uintptr_t>(p), 0, -1);
    {
      std::lock_guard<std::mutex> hold(pinned_lock);
      pinned_pointers.erase(p);
    }
    std::free(p);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* p = nbytes ? std::aligned_alloc(64, (nbytes + 63) / 64 * 64) : nullptr;
    if (p) {
      std::memset(p, 0xFF, nbytes);
      {
        std::lock_guard<std::mutex> hold(pinned_lock);
        pinned_pointers.insert(p);
      }
      call<&Told::allocated>(reinterpret_cast<uintptr_t>(p), nbytes, -1, 0);
    }
    return {p, p, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { std::memcpy(dest, src, count); }
};
Pinned pinned;
// Tensors ask with the pointer of their storage.
bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  return pinned_pointers.count(const_cast<void*>(p)) != 0;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex i) const override { current_device = i; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { auto old = current_device; current_device = i; return old; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::OptionalDeviceGuard guard(impl->device());
    auto data = memory.allocate(nbytes);
    auto kept = std::min(nbytes, impl->nbytes());
    if (kept) std::memcpy(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
  }
};
Hooks hooks;
struct Registered { Registered() { at::RegisterPrivateUse1HooksInterface(&hooks); } } registered;

// ---- operators ----
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kType; }

// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& t) {
  auto* impl = t.storage().unsafeGetStorageImpl();
  if (t.numel()) {
    int64_t last = t.storage_offset();
    for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
    TORCH_CHECK(static_cast<size_t>((last + 1) * t.itemsize()) <= impl->nbytes(),
                "expected memory on the device, found that it was freed (", impl->nbytes(), " bytes left)");
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), impl->nbytes(),
                       c10::DataPtr(impl->mutable_data(), c10::Device(c10::DeviceType::CPU)), nullptr, false);
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}
at::Tensor on_device(const at::Tensor& t, c10::Device device) {
  auto out = empty_strided(t.sizes(), t.strides(), t.scalar_type(), std::nullopt, device, std::nullopt);
  if (t.numel()) {
    auto n = out.storage().nbytes();
    std::memcpy(out.storage().mutable_data(),
                static_cast<const char*>(t.storage().data()) + t.storage_offset() * t.itemsize(), n);
  }
  return out;
}

void note(std::vector<Access>& accesses, const at::Tensor& t, bool writes) {
  if (t.numel() == 0) return;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  int64_t start = t.storage_offset() * t.itemsize();
  accesses.push_back({reinterpret_cast<uintptr_t>(t.storage().data()), start,
                      start + static_cast<int64_t>((last + 1) * t.itemsize()), writes, t.device().index()});
}
void tell(const char* op, const std::vector<Access>& accesses, c10::DeviceIndex device) {
  call<&Told::ran>(op, accesses.data(), accesses.size(), device, current_stream[device]);
  if (simulated_heard) simulated_heard();
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  const auto host = c10::DispatchKeySet(c10::DispatchKey::CPU);
  bool is_view = false, writes = false;
  for (const auto& a : schema.arguments())
    if (a.alias_info()) (a.alias_info()->isWrite() ? writes : is_view) = true;
  const auto& name = op.operator_name().name;
  if ((is_view && !writes) || name == "aten::set_") {
    op.redispatchBoxed(host, stack);
    return;
  }
  std::vector<Access> accesses;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  c10::Device device(kType, current_device);
  bool found = false;
  std::vector<c10::IValue> given(stack->end() - n, stack->end());
  stack->erase(stack->end() - n, stack->end());
  auto take = [&](const at::Tensor& t, bool write) {
    if (is_ours(t)) {
      TORCH_CHECK(!found || device == t.device(), name, ": expected all tensors on one device, found ", device, " and ", t.device());
      device = t.device();
      found = true;
      note(accesses, t, write);
      // An output without elements may be resized, which memory that is only borrowed cannot.
      auto host = write && t.numel() == 0 ? at::empty(t.sizes(), t.options().device(c10::DeviceType::CPU)) : on_host(t);
      if (write) written.emplace_back(t, host);
      return host;
    }
    TORCH_CHECK(!t.defined() || t.dim() == 0 || !write, name, ": expected all tensors on ", device, ", found one on ", t.device());
    return t;
  };
  for (size_t i = 0; i < n; i++) {
    const auto& value = given[i];
    const auto* alias = schema.arguments()[i].alias_info();
    bool write = alias && alias->isWrite();
    if (value.isTensor()) {
      stack->emplace_back(take(value.toTensor(), write));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(take(t, write));
      stack->emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : value.toOptionalTensorVector())
        list.push_back(t ? std::optional<at::Tensor>(take(*t, write)) : std::nullopt);
      stack->emplace_back(std::move(list));
    } else if (value.isDevice()) {
      device = value.toDevice();
      stack->emplace_back(c10::Device(c10::DeviceType::CPU));
    } else {
      stack->push_back(value);
    }
  }
  op.redispatchBoxed(host, stack);
  for (auto& [ours, host] : written) {
    if (ours.sizes() == host.sizes() && ours.strides() == host.strides()) continue;
    auto* impl = ours.unsafeGetTensorImpl();
    if (ours.numel() == 0 && host.numel()) {
      auto made = on_device(host, device);
      note(accesses, made, true);
      impl->set_storage_keep_dtype(made.storage());
    }
    impl->set_sizes_and_strides(host.sizes(), host.strides());
  }
  const auto returns = schema.returns().size();
  std::vector<c10::IValue> results(stack->end() - returns, stack->end());
  stack->erase(stack->end() - returns, stack->end());
  for (size_t i = 0; i < returns; i++) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t k = 0; k < n; k++) {
        const auto* other = schema.arguments()[k].alias_info();
        if (other && *other == *alias) { stack->push_back(given[k]); break; }
      }
    } else if (results[i].isTensor()) {
      auto t = results[i].toTensor();
      if (!t.defined()) { stack->push_back(results[i]); continue; }
      auto made = on_device(t, device);
      note(accesses, made, true);
      stack->emplace_back(made);
    } else if (results[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : results[i].toTensorVector()) {
        auto made = t.defined() ? on_device(t, device) : t;
        if (t.defined()) note(accesses, made, true);
        list.push_back(made);
      }
      stack->emplace_back(std::move(list));
    } else {
      stack->push_back(results[i]);
    }
  }
  tell(name.c_str(), accesses, device.index());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  std::vector<Access> accesses;
  const auto device = (is_ours(from) ? from : to).device().index();
  // Without page-locked memory the host waits, or hands the bytes over before the call is over.
  const auto& other = is_ours(from) ? to : from;
  const bool later = !is_ours(other) && other.numel() && is_pinned(other.storage().data());
  if (is_ours(from) || later) note(accesses, from, false);
  if (is_ours(to) || later) note(accesses, to, true);
  (is_ours(to) ? on_host(to) : to).copy_(is_ours(from) ? on_host(from) : from);
  const char* kind = "copy";
  if (!is_ours(to)) kind = non_blocking && later ? "copy to host" : "copy to host, waiting";
  if (!is_ours(from)) kind = non_blocking ? "copy to device" : "copy to device, waiting";
  tell(kind, accesses, device);
  return to;
}
void record_stream(at::Tensor& t, c10::Stream s) {
  if (t.numel()) call<&Told::used>(reinterpret_cast<uintptr_t>(t.storage().data()), s.device_index(), s.id());
}
at::Scalar item(const at::Tensor& t) {
  std::vector<Access> accesses;
  note(accesses, t, false);
  tell("item", accesses, t.device().index());
  return on_host(t).item();
}

TORCH_LIBRARY(simulated, m) {
  // Alias annotations would make it a view; nothing records it.
  m.def("on_host(Tensor t) -> Tensor");
}
TORCH_LIBRARY_IMPL(simulated, PrivateUse1, m) {
  m.impl("on_host", &on_host);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // Torch's kernel for devices without their own resizes an output that has elements, which warns.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&run>());
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("record_stream", &record_stream);
  m.impl("_local_scalar_dense", &item);
}

}  // namespace

// For nccl.cpp.
void simulated_ran(const char* op, const std::vector<Access>& accesses, c10::DeviceIndex device, int64_t stream) {
  call<&Told::ran>(op, accesses.data(), accesses.size(), device, stream);
}
at::Tensor simulated_on_host(const at::Tensor& tensor) { return on_host(tensor); }

// With null, Python is told no more, and no call is under way afterwards. At the end of the process that must be so: Python
// ends a thread by force that asks for the interpreter then, autograd's for the device, and C++ then ends the process.
extern "C" void simulated_tells(const Told* to) {
  told = to ? *to : Told{};
  while (!to && calls) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
