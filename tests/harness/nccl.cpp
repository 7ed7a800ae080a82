// A backend with the shape of torch's NCCL, without its code, for the device "simulated" (tests/harness/nccl.py).
//
//   communicators   made at the first message of a device, or by `eager_connect_single_device`: through the store, from a
//                   C++ thread; a split is made over the parent, by all of its ranks
//   messages        run later than they are issued, one after the other, between processes over sockets
//   wait            orders the current stream after the message: a stream of the communicator, an event, as on NCCL.
//                   Operators run at once here, so it also returns no earlier than the message ran or was aborted
//   watchdog        one thread: the group's time limit, errors that arrive late, the abort after them
//
// The same groups in the shape of `ProcessGroupNCCL2`, which torch 2.15 makes for "nccl" (struct Nccl2), and of
// `ProcessGroupNCCLLazy`, which is one for all that is not point to point.
//
// What is recorded on streams reaches the clocks through simulated.cpp. Everything that NCCL refuses is refused.
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <random>
#include <set>
#include <thread>

struct Access { uintptr_t base; int64_t start, stop; int32_t writes, device; };
void simulated_ran(const char* op, const std::vector<Access>& accesses, c10::DeviceIndex device, int64_t stream);
at::Tensor simulated_on_host(const at::Tensor& tensor);
extern void (*simulated_heard)();

namespace {

namespace py = pybind11;
using c10d::Backend;
using c10d::Work;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<at::Tensor>;
using std::chrono::milliseconds;
constexpr auto kDevice = c10::DeviceType::PrivateUse1;

struct Message;
using MessagePtr = std::shared_ptr<Message>;

// ---- what tests set and read ----
// Never held while memory is freed, which calls Python.
struct Control {
  std::mutex lock;
  std::condition_variable changed;
  std::mt19937 draws{0};
  std::set<std::string> held, failing;
  // `lazily`: names of the groups whose communicator a message made.
  std::vector<std::string> failures, lazily;
  // Indices of the devices for which this process made communicators, in that order.
  std::vector<int> devices;
  bool premultiplies = true, notices_peers = false, stays_connecting = false, is_over = false, ends_process = false;
  std::vector<MessagePtr> dropped;  // messages that were aborted; their memory is freed outside of the lock
  // How many messages of the kinds that fail do not, before those that do.
  int passing = 0;
  int latest = 60, made = 0, splits = 0, unclosed = 0, queued = 0, launches = 0;
  py::object* frames = nullptr;
};
Control& control() {
  static auto* it = new Control;  // threads may outlive the interpreter
  return *it;
}
void fails(const std::string& text) {
  std::lock_guard<std::mutex> hold(control().lock);
  control().failures.push_back(text);
}
std::string place() {
  if (!control().frames || !Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  std::string text;
  for (const auto& line : (*control().frames)().cast<std::vector<std::string>>()) text += "\n    " + line;
  return text;
}

// ---- messages ----
struct Part {  // one of the messages of a launch
  std::string kind;
  Tensors reads, writes, issued;
  // Fills outputs (of the host) from what each rank read.
  std::function<void(const std::vector<Tensors>&, Tensors&)> total;
  int to = -1, from = -1;  // point to point
  bool uneven = false;  // inputs of other sizes on other ranks, of one dim
};
struct Message {
  std::vector<Part> parts;
  std::string where;
  Clock::time_point begun = Clock::now();
  int after = 0;
  bool may_run = false, held = false, fails = false, over = false, aborted = false;
  std::exception_ptr error;
  Clock::time_point error_at{};
  std::string late;  // an error that the watchdog finds later
  c10::Event end{kDevice};
  bool recorded = false;
  // Holds a launch until its block is at its end.
  bool launched = false;
  std::string kinds() const {
    std::string names;
    for (const auto& part : parts) if (names.find(part.kind) == std::string::npos) names += (names.empty() ? "" : ", ") + part.kind;
    return names;
  }
};

bool was_freed(const at::Tensor& t) {
  return t.numel() && t.storage().nbytes() < static_cast<size_t>((t.storage_offset() + t.numel()) * t.itemsize());
}
at::Tensor bytes_of(const at::Tensor& t) { return t.reshape({-1}).view(at::kByte); }

// ---- communicator ----
struct Comm {
  int rank = 0, size = 1;
  c10::Device device{kDevice, 0};
  std::vector<int> sockets;
  c10::Stream stream;
  std::deque<MessagePtr> queue;
  std::thread thread;
  bool aborted = false, closing = false;
  std::string reason;
  explicit Comm(c10::Stream made) : stream(made) {}

  bool moves(int socket, void* data, size_t n, bool sends) {
    auto* at = static_cast<char*>(data);
    while (n) {
      {
        std::lock_guard<std::mutex> hold(control().lock);
        if (aborted || control().is_over) return false;
      }
      pollfd ready{socket, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
      if (::poll(&ready, 1, 20) <= 0) continue;
      auto moved = sends ? ::send(socket, at, n, MSG_NOSIGNAL | MSG_DONTWAIT) : ::recv(socket, at, n, MSG_DONTWAIT);
      if (moved < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (moved <= 0) {
        // The peer is gone. NCCL finds out over some links only; over others its kernel waits for ever.
        std::unique_lock<std::mutex> hold(control().lock);
        if (control().notices_peers)
          throw std::runtime_error("NCCL error: remote process exited or there was a network error");
        control().changed.wait(hold, [&] { return aborted || control().is_over; });
        return false;
      }
      at += moved;
      n -= moved;
    }
    return true;
  }
  // Everyone's text, by rank. Empty if it was aborted meanwhile.
  std::vector<std::string> exchange(const std::string& own) {
    std::vector<std::string> found(size);
    found[rank] = own;
    std::thread sender([&] {
      try {
        for (int step = 1; step < size; step++) {
          int peer = (rank + step) % size;
          uint64_t n = own.size();
          if (!moves(sockets[peer], &n, sizeof n, true) || !moves(sockets[peer], const_cast<char*>(own.data()), n, true)) return;
        }
      } catch (const std::exception&) {}
    });
    bool whole = true;
    std::exception_ptr error;
    try {
      for (int step = 1; step < size && whole; step++) {
        int peer = (rank - step + size) % size;
        uint64_t n = 0;
        whole = moves(sockets[peer], &n, sizeof n, false);
        if (whole) found[peer].resize(n);
        whole = whole && moves(sockets[peer], found[peer].data(), n, false);
      }
    } catch (...) { error = std::current_exception(); }
    sender.join();
    if (error) std::rethrow_exception(error);
    return whole ? found : std::vector<std::string>();
  }
  void connect(const std::string& id, Clock::time_point until);
  void run();
  void run(Message& message);
  void abort(const std::string& why);
  ~Comm() { for (int socket : sockets) if (socket >= 0) ::close(socket); }
};

sockaddr_un address(const std::string& id, int rank, socklen_t& n) {
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  auto name = "fullshard-" + id + "-" + std::to_string(rank);
  std::memcpy(at.sun_path + 1, name.data(), name.size());  // an abstract name: no file is left
  n = offsetof(sockaddr_un, sun_path) + 1 + name.size();
  return at;
}

void Comm::connect(const std::string& id, Clock::time_point until) {
  sockets.assign(size, -1);
  auto late = [&] {
    std::lock_guard<std::mutex> hold(control().lock);
    return aborted || control().is_over || Clock::now() > until;
  };
  // NCCL waits here for all ranks, and nothing but an abort ends that.
  while (true) {
    std::unique_lock<std::mutex> hold(control().lock);
    if (!control().stays_connecting || control().is_over) break;
    control().changed.wait_for(hold, milliseconds(20));
  }
  socklen_t n = 0;
  auto at = address(id, rank, n);
  int listens = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  TORCH_CHECK(::bind(listens, reinterpret_cast<sockaddr*>(&at), n) == 0 && ::listen(listens, size) == 0,
              "NCCL: the id ", id, " was used before");
  const char* host = std::getenv("NCCL_HOSTID");
  auto own = (host ? std::string(host) : std::to_string(::getpid())) + "/" + std::to_string(device.index());
  own.resize(200);
  std::vector<std::string> places(size, own);
  auto fail = [&] { ::close(listens); TORCH_CHECK(false, "NCCL: the communicator was not made: its time limit, or an abort"); };
  for (int peer = 0; peer < rank; peer++) {
    auto theirs = address(id, peer, n);
    int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (::connect(socket, reinterpret_cast<sockaddr*>(&theirs), n)) {
      if (late()) { ::close(socket); fail(); }
      std::this_thread::sleep_for(milliseconds(1));
    }
    sockets[peer] = socket;
    int32_t me = rank;
    if (!moves(socket, &me, sizeof me, true) || !moves(socket, own.data(), own.size(), true)) fail();
  }
  for (int i = rank + 1; i < size; i++) {
    pollfd ready{listens, POLLIN, 0};
    while (::poll(&ready, 1, 20) <= 0) if (late()) fail();
    int socket = ::accept4(listens, nullptr, nullptr, SOCK_CLOEXEC);
    int32_t peer = 0;
    if (!moves(socket, &peer, sizeof peer, false)) fail();
    sockets[peer] = socket;
    if (!moves(socket, places[peer].data(), own.size(), false)) fail();
  }
  ::close(listens);
  // Only now do all know all: each tells the others whom it found.
  std::string mine;
  for (const auto& one : places) mine += one;
  auto told = exchange(own);
  TORCH_CHECK(static_cast<int>(told.size()) == size, "NCCL: the communicator was aborted while it was made");
  for (int a = 0; a < size; a++)
    for (int b = 0; b < a; b++)
      TORCH_CHECK(told[a] != told[b], "NCCL invalid usage: Duplicate GPU detected : rank ", b, " and rank ", a,
                  " both on device ", told[a].c_str());
}

void Comm::run() {
  auto& c = control();
  while (true) {
    MessagePtr message;
    {
      std::unique_lock<std::mutex> hold(c.lock);
      c.changed.wait(hold, [&] { return aborted || closing || (!queue.empty() && queue.front()->may_run); });
      if (aborted || (closing && queue.empty())) return;
      if (queue.empty() || !queue.front()->may_run) continue;
      message = queue.front();
    }
    try {
      run(*message);
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> hold(c.lock);
      message->late = error.what();
    }
    // It lets go of its memory before it is over.
    message->parts.clear();
    std::unique_lock<std::mutex> hold(c.lock);
    if (message->fails && message->late.empty()) message->late = "NCCL error: unhandled system error (injected)";
    if (!message->late.empty()) {
      // Its kernel would not end before the watchdog finds the error and aborts.
      c.changed.wait(hold, [&] { return aborted || c.is_over; });
      return;
    }
    if (!queue.empty() && queue.front() == message) {
      queue.pop_front();
      --c.queued;
    }
    message->over = true;
    c.changed.notify_all();
  }
}

void Comm::run(Message& message) {
  at::NoGradGuard no_grad;
  for (auto& part : message.parts) {
    Tensors inputs;
    std::string own;
    for (size_t i = 0; i < part.reads.size(); i++) {
      const auto& read = part.reads[i];
      if (was_freed(read)) {
        fails(part.kind + ": its memory was freed before it was read; issued at" + message.where);
        inputs.push_back(part.issued[i]);
        continue;
      }
      auto found = simulated_on_host(read).clone();
      if (!at::equal(bytes_of(found), bytes_of(part.issued[i])))
        fails(part.kind + ": its input was changed before it ran; issued at" + message.where);
      inputs.push_back(found);
    }
    auto text = [](const at::Tensor& t) { return std::string(static_cast<const char*>(t.data_ptr()), t.numel() * t.itemsize()); };
    Tensors outputs;
    if (part.to >= 0 || part.from >= 0) {
      for (auto& input : inputs) {
        auto bytes = text(input);
        if (!moves(sockets[part.to], bytes.data(), bytes.size(), true)) return;
      }
      for (auto& write : part.writes) {
        auto out = at::empty(write.sizes(), write.options().device(at::kCPU));
        if (!moves(sockets[part.from], out.data_ptr(), out.numel() * out.itemsize(), false)) return;
        outputs.push_back(out);
      }
    } else {
      std::string head = part.kind;
      for (const auto& input : inputs)
        head += " " + std::string(c10::toString(input.scalar_type())) + (part.uneven ? "" : std::to_string(input.numel()));
      head.resize(4000);
      own = head;
      for (const auto& input : inputs) {
        const int64_t numel = input.numel();
        if (part.uneven) own += std::string(reinterpret_cast<const char*>(&numel), sizeof numel);
        own += text(input);
      }
      auto all = exchange(own);
      if (all.empty()) return;
      std::vector<Tensors> read(size);
      for (int r = 0; r < size; r++) {
        // NCCL would wait for ever, or mix up bytes.
        TORCH_CHECK(all[r].substr(0, 4000) == head, "NCCL: rank ", rank, " is at ", head.c_str(), ", rank ", r, " at ", all[r].c_str());
        size_t at = 4000;
        for (const auto& input : inputs) {
          auto copy = at::empty_like(input, at::MemoryFormat::Contiguous);
          if (part.uneven) {
            int64_t numel = 0;
            std::memcpy(&numel, all[r].data() + at, sizeof numel);
            copy = at::empty({numel}, input.options());
            at += sizeof numel;
          }
          if (copy.numel()) std::memcpy(copy.data_ptr(), all[r].data() + at, copy.numel() * copy.itemsize());
          at += copy.numel() * copy.itemsize();
          read[r].push_back(copy);
        }
      }
      for (const auto& write : part.writes) outputs.push_back(at::empty(write.sizes(), write.options().device(at::kCPU)));
      part.total(read, outputs);
    }
    {
      std::lock_guard<std::mutex> hold(control().lock);
      if (aborted) return;
      if (message.fails) continue;  // nothing arrives
    }
    for (size_t i = 0; i < part.writes.size(); i++) {
      if (was_freed(part.writes[i]))
        fails(part.kind + ": its memory was freed before it was written; issued at" + message.where);
      else
        simulated_on_host(part.writes[i]).copy_(outputs[i]);
    }
  }
}

// Under the lock. What was under way is over, without its bytes; the watchdog finds out about the error later.
void Comm::abort(const std::string& why) {
  if (aborted) return;
  aborted = true;
  reason = why;
  for (auto& message : queue) {
    message->over = message->aborted = message->may_run = true;
    if (message->late.empty()) message->late = "NCCL communicator was aborted on rank " + std::to_string(rank) + ". " + why;
    --control().queued;
  }
  control().dropped.insert(control().dropped.end(), queue.begin(), queue.end());
  queue.clear();
  control().changed.notify_all();
}

// ---- work ----
struct Nccl;
struct NcclWork final : Work {
  MessagePtr message;
  // Of an `Nccl2`: a wait after an abort raises.
  bool tells_of_aborts = false;
  // As on NCCL: inputs and outputs are held until a stream waits, outputs for as long as the work is.
  Tensors stash, outputs;
  c10::Device device;
  bool blocks = false;  // a barrier
  NcclWork(int rank, c10d::OpType type, MessagePtr m, Tensors held, Tensors out, c10::Device d)
      : Work(rank, type), message(std::move(m)), stash(std::move(held)), outputs(std::move(out)), device(d) {}
  bool isCompleted() override {
    std::lock_guard<std::mutex> hold(control().lock);
    return message->over;
  }
  bool isSuccess() const override {
    std::lock_guard<std::mutex> hold(control().lock);
    return message->over && !message->error;
  }
  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> hold(control().lock);
    return message->error;
  }
  std::vector<at::Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    // Complete at once: streams wait, not the host.
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(outputs);
    return future;
  }
  void synchronize() override { wait(); }
  void abort() override {}
  bool wait(milliseconds = milliseconds(0)) override;
};

// ---- the group ----
struct Config {
  int blocking = std::numeric_limits<int>::min(), max_ctas = std::numeric_limits<int>::min();
  std::string net_name;
};
struct NcclOptions : Backend::Options {
  explicit NcclOptions(bool high = false) : Backend::Options("nccl", milliseconds(600000)), is_high_priority_stream(high) {}
  bool is_high_priority_stream;
  Config config;
  c10::intrusive_ptr<Backend> split_from;
  int split_color = -2;
  // Of `Nccl2`: the communicator is made by the first message, though the device is known.
  bool lazy_init = false;
};

struct Nccl : Backend {
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<NcclOptions> options_;
  std::map<int, std::shared_ptr<Comm>> comms_;
  std::deque<c10::weak_intrusive_ptr<Work>> works_;
  // Messages that the watchdog looks at, which hold no tensors.
  std::deque<MessagePtr> watched_;
  bool aborted_ = false, shut_ = false;
  c10d::ErrorType error_ = c10d::ErrorType::SUCCESS;
  int blocks_ = 0, counter_ = 0;
  MessagePtr block_;
  Tensors block_stash_, block_outputs_;
  int block_device_ = 0;

  Nccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<NcclOptions> options)
      : Backend(rank, size), store_(std::move(store)), options_(std::move(options)) {}
  ~Nccl() override;
  template <typename T>
  static c10::intrusive_ptr<T> make(c10::intrusive_ptr<T> made);

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return counter_; }
  c10d::ErrorType getError() override {
    std::lock_guard<std::mutex> hold(control().lock);
    return error_;
  }
  void eagerConnectSingleDevice(at::Device device) override { comm(device, true); }
  void performNocolorSplit(at::Device device) { split_of(*comm(device, true), -1); }
  // What differs in `Nccl2`.
  virtual void of_device(c10::Device) {}
  virtual bool is_second() const { return false; }
  virtual c10::intrusive_ptr<Nccl> child(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                         c10::intrusive_ptr<NcclOptions> options) {
    return make(c10::make_intrusive<Nccl>(std::move(store), rank, size, std::move(options)));
  }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Backend::Options>& given) override {
    TORCH_CHECK(!comms_.empty(), "NCCL: a group can be split once it has a communicator");
    c10::Device device(kDevice, comms_.begin()->first);
    auto found = std::find(ranks.begin(), ranks.end(), rank_);
    if (found == ranks.end()) {
      performNocolorSplit(device);
      return nullptr;
    }
    auto* like = dynamic_cast<NcclOptions*>(given.get());
    auto made = like ? c10::make_intrusive<NcclOptions>(*like) : c10::make_intrusive<NcclOptions>();
    made->split_from = c10::intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(this);
    made->split_color = 0;
    for (int r : ranks) made->split_color = (made->split_color * 31 + r + 1) & 0xFFFFFF;
    auto group = child(store, found - ranks.begin(), ranks.size(), made);
    group->eagerConnectSingleDevice(device);
    return group;
  }

  void abort() override {
    if (is_second()) {  // told before the messages end, so that those under way report it
      std::lock_guard<std::mutex> hold(control().lock);
      error_ = c10d::ErrorType::COMM_ERROR;
    }
    end("abort() was called", true);
  }
  void shutdown() override { end("shutdown() was called", false); }
  void end(const std::string& why, bool now) {
    {
      std::unique_lock<std::mutex> hold(control().lock);
      for (auto& [_, one] : comms_)
        for (auto& message : one->queue) message->may_run = message->may_run || !now;
      control().changed.notify_all();
      auto drained = [&] {
        return std::all_of(comms_.begin(), comms_.end(), [](auto& one) { return one.second->queue.empty() || one.second->aborted; });
      };
      if (!now) control().changed.wait_for(hold, milliseconds(5000), drained);
      aborted_ = aborted_ || now;
      shut_ = true;
      for (auto& [_, one] : comms_) one->abort(why);
    }
    for (auto& [_, one] : comms_)
      if (one->thread.joinable() && one->thread.get_id() != std::this_thread::get_id()) one->thread.join();
  }

  // ---- communicators ----
  std::shared_ptr<Comm> comm(c10::Device device, bool asked) {
    TORCH_CHECK(device.type() == kDevice, "Tensors must be CUDA and dense, found a device of type ", device.type());
    of_device(device);
    {
      std::lock_guard<std::mutex> hold(control().lock);
      auto found = comms_.find(device.index());
      if (found != comms_.end()) {
        TORCH_CHECK(!found->second->aborted, "NCCL communicator was aborted on rank ", rank_, ". ", found->second->reason);
        return found->second;
      }
      TORCH_CHECK(!shut_, "NCCL: the group of rank ", rank_, " was shut down");
    }
    auto* guard = c10::impl::getDeviceGuardImpl(kDevice);
    auto made = std::make_shared<Comm>(guard->getNewStream(device, options_->is_high_priority_stream ? -1 : 0));
    made->rank = rank_;
    made->size = size_;
    made->device = device;
    std::exception_ptr error;
    // NCCL calls the store from C++, on a thread that need not be Python's.
    std::thread connects([&] {
      try {
        std::string id;
        if (options_->split_from && options_->split_color >= 0) {
          auto* parent = dynamic_cast<Nccl*>(options_->split_from.get());
          TORCH_CHECK(parent, "NCCL: split_from: expected a group of NCCL");
          id = parent->split_of(*parent->comm(device, true), options_->split_color);
        } else if (size_ > 1) {
          id = unique_id();
        }
        if (size_ > 1) made->connect(id, Clock::now() + std::chrono::hours(1));
      } catch (...) { error = std::current_exception(); }
    });
    connects.join();
    if (error) std::rethrow_exception(error);
    std::lock_guard<std::mutex> hold(control().lock);
    comms_[device.index()] = made;
    control().devices.push_back(device.index());
    ++control().made;
    if (!asked) control().lazily.push_back(options_->group_name);
    made->thread = std::thread([at = made.get()] { at->run(); });
    return made;
  }
  std::string unique_id() {
    auto key = std::to_string(counter_++);
    if (rank_ == 0) {
      std::random_device random;
      std::string id;
      for (int i = 0; i < 4; i++) id += std::to_string(random());
      store_->set(key, std::vector<uint8_t>(id.begin(), id.end()));
      return id;
    }
    try {
      auto found = store_->get(key);
      return std::string(found.begin(), found.end());
    } catch (const std::exception& error) {
      C10_THROW_ERROR(DistBackendError, c10::str("[", rank_, "] is setting up NCCL communicator and retrieving ncclUniqueId from "
          "[0] via c10d key-value store by key '", key, "', but store->get('", key, "') got error: ", error.what()));
    }
  }
  // Collective over this group, in the order of its messages. The id of the new communicator.
  std::string split_of(Comm& parent, int color) {
    std::random_device random;
    auto text = std::to_string(color) + " " + std::to_string(random()) + std::to_string(random());
    ++control().splits;
    auto told = parent.exchange(text);
    TORCH_CHECK(!told.empty(), "NCCL: the parent was aborted while it was split");
    for (const auto& one : told)
      if (one.substr(0, one.find(' ')) == std::to_string(color)) return one.substr(one.find(' ') + 1);
    return "";
  }

  // ---- messages ----
  void check(const at::Tensor& t) {
    TORCH_CHECK(t.device().type() == kDevice && !t.is_sparse(), "Tensors must be CUDA and dense, found one on ", t.device());
    TORCH_CHECK(t.is_contiguous(t.suggest_memory_format()), "Tensors must be contiguous");
    switch (t.scalar_type()) {
      case at::kFloat: case at::kDouble: case at::kHalf: case at::kBFloat16: case at::kByte: case at::kChar: case at::kInt:
      case at::kLong: case at::kBool:
        return;
      default:
        TORCH_CHECK_WITH(TypeError, false, "Input tensor data type is not supported for NCCL process group: ", t.scalar_type());
    }
  }
  void check(const Tensors& tensors) {
    TORCH_CHECK(!tensors.empty(), "Tensor list must be nonempty");
    for (const auto& t : tensors) {
      check(t);
      TORCH_CHECK_WITH(TypeError, t.scalar_type() == tensors[0].scalar_type(), "Tensors must have identical type");
      TORCH_CHECK(t.device() == tensors[0].device(), "Tensors must be on the same device");
    }
  }
  void check(const c10d::ReduceOp& op, const at::Tensor& t) {
    if (op == c10d::ReduceOp::PREMUL_SUM) {
      std::lock_guard<std::mutex> hold(control().lock);
      TORCH_CHECK(control().premultiplies, "PREMUL_SUM requires NCCL 2.11.1 or later");
      TORCH_CHECK(t.is_floating_point(), "PREMUL_SUM requires a floating dtype");
    }
    TORCH_CHECK(!(op == c10d::ReduceOp::AVG && t.scalar_type() == at::kBool), "Cannot use ReduceOp.AVG with Boolean inputs");
    TORCH_CHECK(op != c10d::ReduceOp::BAND && op != c10d::ReduceOp::BOR && op != c10d::ReduceOp::BXOR,
                "Cannot use ReduceOp.BAND, BOR or BXOR with NCCL");
  }
  at::Tensor reduced(const std::vector<Tensors>& read, size_t i, const c10d::ReduceOp& op) {
    auto total = read[0][i].clone();
    for (size_t r = 1; r < read.size(); r++) {
      if (op == c10d::ReduceOp::MIN) total = at::minimum(total, read[r][i]);
      else if (op == c10d::ReduceOp::MAX) total = at::maximum(total, read[r][i]);
      else if (op == c10d::ReduceOp::PRODUCT) total.mul_(read[r][i]);
      else total.add_(read[r][i]);
    }
    if (op == c10d::ReduceOp::AVG) total = total.is_floating_point() ? total.div_(size_) : at::div(total, size_, "trunc");
    if (op == c10d::ReduceOp::PREMUL_SUM) {
      auto* factor = reinterpret_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      total = factor->tensor_factor.defined() ? total.mul_(simulated_on_host(factor->tensor_factor)) : total.mul_(factor->double_factor);
    }
    return total;
  }

  c10::intrusive_ptr<Work> issue(c10d::OpType type, Part part, bool blocks = false) {
    const auto device = (part.reads.empty() ? part.writes : part.reads)[0].device();
    auto one = comm(device, false);
    ++counter_;
    auto message = block_;
    if (!blocks_) message = std::make_shared<Message>();
    if (message->parts.empty()) {
      // The message comes after what was queued before it; inside of a block, before its first one.
      c10::Event before{kDevice};
      auto* guard = c10::impl::getDeviceGuardImpl(kDevice);
      before.record(guard->getStream(device));
      before.block(one->stream);
      message->where = place();
    }
    at::NoGradGuard no_grad;
    // An operation in place reads what it writes; the others find NaN in their outputs until they ran.
    Tensors hosts;
    for (const auto& t : part.reads) {
      hosts.push_back(simulated_on_host(t));
      part.issued.push_back(hosts.back().clone());
    }
    for (const auto& t : part.writes) {
      bool in_place = std::any_of(part.reads.begin(), part.reads.end(), [&](auto& read) { return read.is_same(t) || (read.data_ptr() == t.data_ptr() && read.numel() == t.numel()); });
      if (t.numel() && !in_place) std::memset(simulated_on_host(t).data_ptr(), 0xFF, t.numel() * t.itemsize());
    }
    for (size_t i = 0; i < hosts.size(); i++) hosts[i].copy_(part.issued[i]);
    Tensors stash = part.reads, outputs = part.writes;
    stash.insert(stash.end(), part.writes.begin(), part.writes.end());
    message->parts.push_back(std::move(part));
    if (blocks_) {
      block_device_ = device.index();
      block_stash_.insert(block_stash_.end(), stash.begin(), stash.end());
      block_outputs_.insert(block_outputs_.end(), outputs.begin(), outputs.end());
      // Its end is recorded with the block's: a wait for it orders nothing.
      return c10::make_intrusive<NcclWork>(rank_, type, std::make_shared<Message>(), Tensors(), outputs, device);
    }
    launch(one, message);
    auto work = c10::make_intrusive<NcclWork>(rank_, type, message, stash, outputs, device);
    work->blocks = blocks;
    work->tells_of_aborts = is_second();
    return work;
  }
  void launch(const std::shared_ptr<Comm>& one, const MessagePtr& message) {
    const auto device = one->device.index();
    for (const auto& part : message->parts) {
      std::vector<Access> accesses;
      auto note = [&](const Tensors& tensors, bool writes) {
        for (const auto& t : tensors) {
          if (!t.numel()) continue;
          int64_t start = t.storage_offset() * t.itemsize();
          accesses.push_back({reinterpret_cast<uintptr_t>(t.storage().data()), start,
                              start + static_cast<int64_t>(t.numel() * t.itemsize()), writes, device});
        }
      };
      note(part.reads, false);
      note(part.writes, true);
      simulated_ran(part.kind.c_str(), accesses, device, one->stream.id());
    }
    message->end.record(one->stream);
    auto& c = control();
    std::lock_guard<std::mutex> hold(c.lock);
    message->recorded = message->launched = true;
    message->begun = Clock::now();
    message->after = std::uniform_int_distribution<int>(0, c.latest - 1)(c.draws);
    for (const auto& part : message->parts) {
      message->held = message->held || c.held.count(part.kind);
      message->fails = message->fails || c.failing.count(part.kind);
    }
    if (message->fails && c.passing > 0) --c.passing, message->fails = false;
    message->may_run = !message->held && message->after == 0;
    one->queue.push_back(message);
    watched_.push_back(message);
    ++c.queued, ++c.launches;
    c.changed.notify_all();
  }

  void startCoalescing() override {
    if (!blocks_++) block_ = std::make_shared<Message>();
  }
  c10::intrusive_ptr<Work> endCoalescing() override {
    TORCH_CHECK(blocks_, "NCCL: endCoalescing without startCoalescing");
    if (--blocks_) return nullptr;
    auto message = std::move(block_);
    auto stash = std::move(block_stash_), outputs = std::move(block_outputs_);
    block_stash_.clear(), block_outputs_.clear(), block_ = nullptr;
    if (message->parts.empty()) return nullptr;
    c10::Device device(kDevice, block_device_);
    launch(comm(device, false), message);
    return c10::make_intrusive<NcclWork>(rank_, c10d::OpType::COALESCED, message, stash, outputs, device);
  }

  // ---- calls ----
  // Several messages: one launch, or, of an `Nccl2`, one after the other, and the last one's work is that of all.
  template <typename Call>
  c10::intrusive_ptr<Work> each(Tensors& out, Tensors& in, Call call) {
    if (!is_second()) return call(out, in);
    c10::intrusive_ptr<Work> last;
    Tensors stash, outputs;
    for (size_t i = 0; i < out.size(); i++) {
      last = call(Tensors{out[i]}, Tensors{in[i]});
      auto* work = static_cast<NcclWork*>(last.get());
      stash.insert(stash.end(), work->stash.begin(), work->stash.end());
      outputs.insert(outputs.end(), work->outputs.begin(), work->outputs.end());
    }
    auto* work = static_cast<NcclWork*>(last.get());
    work->stash = std::move(stash), work->outputs = std::move(outputs);
    return last;
  }
  c10::intrusive_ptr<Work> gathers(Tensors outputs, Tensors inputs, c10d::OpType type) {
    check(inputs), check(outputs);
    TORCH_CHECK(inputs.size() == outputs.size(), "expected as many outputs as inputs");
    for (size_t i = 0; i < inputs.size(); i++) {
      TORCH_CHECK_WITH(TypeError, inputs[i].scalar_type() == outputs[i].scalar_type(), "output tensor must have the same type as input tensor");
      TORCH_CHECK_WITH(ValueError, inputs[i].numel() * size_ == outputs[i].numel(), "output tensor size must be equal to world_size times input tensor size");
    }
    return issue(type, {"all-gather", inputs, outputs, {}, [](const auto& read, Tensors& out) {
      for (size_t i = 0; i < out.size(); i++) {
        auto rows = out[i].view({static_cast<int64_t>(read.size()), -1});
        for (size_t r = 0; r < read.size(); r++) rows[r].copy_(read[r][i].reshape({-1}));
      }
    }});
  }
  c10::intrusive_ptr<Work> scatters(Tensors outputs, Tensors inputs, c10d::ReduceOp op, c10d::OpType type) {
    check(inputs), check(outputs);
    TORCH_CHECK(inputs.size() == outputs.size(), "expected as many outputs as inputs");
    for (size_t i = 0; i < inputs.size(); i++) {
      check(op, inputs[i]);
      TORCH_CHECK_WITH(TypeError, inputs[i].scalar_type() == outputs[i].scalar_type(), "input tensor must be the same type as the output tensor");
      TORCH_CHECK_WITH(ValueError, outputs[i].numel() * size_ == inputs[i].numel(), "input tensor must be the same size as output size times world size");
    }
    return issue(type, {"reduce-scatter", inputs, outputs, {}, [this, op, rank = rank_, size = size_](const auto& read, Tensors& out) {
      for (size_t i = 0; i < out.size(); i++) out[i].view({-1}).copy_(reduced(read, i, op).view({size, -1})[rank]);
    }});
  }
  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions&) override {
    return gathers({out}, {in}, c10d::OpType::_ALLGATHER_BASE);
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions&) override {
    return each(out, in, [&](Tensors o, Tensors i) { return gathers(std::move(o), std::move(i), c10d::OpType::COALESCED); });
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return scatters({out}, {in}, o.reduceOp, c10d::OpType::_REDUCE_SCATTER_BASE);
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    return each(out, in, [&](Tensors to, Tensors from) { return scatters(std::move(to), std::move(from), o.reduceOp, c10d::OpType::COALESCED); });
  }
  c10::intrusive_ptr<Work> allreduces(Tensors tensors, c10d::ReduceOp op, bool blocks = false) {
    check(tensors);
    for (const auto& t : tensors) check(op, t);
    return issue(c10d::OpType::ALLREDUCE, {"all-reduce", tensors, tensors, {}, [this, op](const auto& read, Tensors& out) {
      for (size_t i = 0; i < out.size(); i++) out[i].copy_(reduced(read, i, op));
    }}, blocks);
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    TORCH_CHECK(tensors.size() == 1, "Expecting one tensor only");
    return allreduces(tensors, o.reduceOp);
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return each(tensors, tensors, [&](Tensors to, Tensors) { return allreduces(std::move(to), o.reduceOp); });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override {
    auto* guard = c10::impl::getDeviceGuardImpl(kDevice);
    auto device = comms_.empty() ? guard->getDevice() : c10::Device(kDevice, comms_.begin()->first);
    auto one = at::zeros({1}, at::TensorOptions().device(device));
    return allreduces({one}, c10d::ReduceOp::SUM, true);
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    check(tensors);
    return issue(c10d::OpType::BROADCAST, {"broadcast", tensors, tensors, {}, [root = o.rootRank](const auto& read, Tensors& out) {
      for (size_t i = 0; i < out.size(); i++) out[i].copy_(read[root][i]);
    }});
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    check(tensors);
    check(o.reduceOp, tensors[0]);
    return issue(c10d::OpType::REDUCE, {"reduce", tensors, tensors, {}, [this, op = o.reduceOp, root = o.rootRank](const auto& read, Tensors& out) {
      for (size_t i = 0; i < out.size(); i++) out[i].copy_(rank_ == root ? reduced(read, i, op) : read[rank_][i]);
    }});
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    check(inputs), check(outputs[0]);
    return issue(c10d::OpType::ALLGATHER, {"all-gather", inputs, outputs[0], {}, [](const auto& read, Tensors& out) {
      for (size_t r = 0; r < out.size(); r++) out[r].copy_(read[r][0].view_as(out[r]));
    }});
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    check(outputs), check(inputs[0]);
    check(o.reduceOp, outputs[0]);
    return issue(c10d::OpType::REDUCE_SCATTER, {"reduce-scatter", inputs[0], outputs, {}, [this, op = o.reduceOp](const auto& read, Tensors& out) {
      out[0].copy_(reduced(read, rank_, op));
    }});
  }
  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    check(inputs);
    auto out = rank_ == o.rootRank ? outputs[0] : Tensors();
    if (!out.empty()) check(out);
    return issue(c10d::OpType::GATHER, {"gather", inputs, out, {}, [](const auto& read, Tensors& out) {
      for (size_t r = 0; r < out.size(); r++) out[r].copy_(read[r][0]);
    }});
  }
  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins,
                                         const c10d::AllToAllOptions&) override {
    check(Tensors{out, in});
    if (!outs.empty() || !ins.empty()) {  // chunks of these rows
      TORCH_CHECK(static_cast<int>(outs.size()) == size_ && static_cast<int>(ins.size()) == size_, "expected a size for each rank");
      Tensors chunks;
      int64_t at = 0;
      for (auto rows : ins) chunks.push_back(in.narrow(0, at, rows)), at += rows;
      TORCH_CHECK(at == in.size(0), "Split sizes doesn't match total dim 0 size");
      Part part{"all-to-all", chunks, {out}, {}, [outs, rank = rank_](const auto& read, Tensors& out) {
        int64_t at = 0;
        for (size_t r = 0; r < read.size(); r++) out[0].narrow(0, at, outs[r]).copy_(read[r][rank]), at += outs[r];
      }};
      part.uneven = true;
      return issue(c10d::OpType::ALLTOALL_BASE, std::move(part));
    }
    return issue(c10d::OpType::ALLTOALL_BASE, {"all-to-all", {in}, {out}, {}, [rank = rank_](const auto& read, Tensors& out) {
      auto rows = out[0].view({static_cast<int64_t>(read.size()), -1});
      for (size_t r = 0; r < read.size(); r++) rows[r].copy_(read[r][0].view({static_cast<int64_t>(read.size()), -1})[rank]);
    }});
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int peer, int) override {
    check(tensors);
    Part part{"send", tensors, {}, {}, nullptr};
    part.to = peer;
    return issue(c10d::OpType::SEND, std::move(part));
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int peer, int) override {
    check(tensors);
    Part part{"recv", {}, tensors, {}, nullptr};
    part.from = peer;
    return issue(c10d::OpType::RECV, std::move(part));
  }
};

// ---- the NCCL of torch 2.15 ----
// Bound to one device, and connected when it is bound. What registers it with a group binds it: to the group's device,
// or, of a group without one, to that of its rank in the default group (so it connects, on whatever device that is).
struct Nccl2 : Nccl {
  using Nccl::Nccl;
  static constexpr int kDevices = 8;
  std::optional<c10::Device> bound_;

  const std::string getBackendName() const override { return "nccl2"; }
  bool is_second() const override { return true; }
  bool supportsSplitting() const override { return !options_->lazy_init || !comms_.empty(); }
  c10::intrusive_ptr<Nccl> child(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                 c10::intrusive_ptr<NcclOptions> options) override {
    return make(c10::make_intrusive<Nccl2>(std::move(store), rank, size, std::move(options)));
  }
  void bind(std::optional<c10::Device> device) {
    if (!device && !bound_) {
      auto& ranks = options_->global_ranks_in_group;
      auto rank = static_cast<size_t>(rank_) < ranks.size() ? static_cast<int>(ranks[rank_]) : rank_;
      device = c10::Device(kDevice, static_cast<c10::DeviceIndex>(rank % kDevices));
    }
    if (!device) return;
    of_device(*device);
    bound_ = device;
    if (!options_->lazy_init) comm(*device, true);
  }
  void of_device(c10::Device device) override {
    TORCH_CHECK(!bound_ || *bound_ == device, "ProcessGroupNCCL is bound to device ", bound_->str(),
                " but an operation was issued on ", device.str());
  }
  void eagerConnectSingleDevice(at::Device device) override { bind(device); }
  // Up to 2.13 torch has no virtual call of the registration itself; this one comes right after it.
  void setGroupUid(const std::string& uid) override {
    Backend::setGroupUid(uid);
    bind(getBoundDeviceId());
  }
};
struct NcclLazy final : Nccl2 {
  using Nccl2::Nccl2;
  const std::string getBackendName() const override { return "nccl-lazy"; }
};

// ---- all groups: operators that ran, the watchdog, the end of a job ----
struct All {
  std::mutex lock;
  std::map<Nccl*, c10::weak_intrusive_ptr<Nccl>> groups;
  bool is_watched = false;
};
All& all() {
  static auto* it = new All;
  return *it;
}
std::vector<c10::intrusive_ptr<Nccl>> living() {
  std::vector<c10::intrusive_ptr<Nccl>> found;
  std::lock_guard<std::mutex> hold(all().lock);
  for (auto& [_, group] : all().groups)
    if (auto one = group.lock()) found.push_back(std::move(one));
  return found;
}

void heard() {
  if (!control().queued) return;
  auto groups = living();
  std::lock_guard<std::mutex> hold(control().lock);
  for (auto& group : groups)
    for (auto& [_, one] : group->comms_)
      if (!one->queue.empty() && !one->queue.front()->held && !one->queue.front()->may_run && --one->queue.front()->after <= 0) {
        one->queue.front()->may_run = true;
        control().changed.notify_all();
      }
}

void watch() {
  while (true) {
    std::this_thread::sleep_for(milliseconds(20));
    std::vector<MessagePtr> dropped;
    {
      std::lock_guard<std::mutex> hold(control().lock);
      dropped.swap(control().dropped);
    }
    dropped.clear();
    for (auto& group : living()) {
      std::vector<MessagePtr> messages;
      bool signals = false;
      {
        std::lock_guard<std::mutex> hold(control().lock);
        auto now = Clock::now();
        for (auto& message : group->watched_) {
          bool late = !message->over && now > message->begun + group->options_->timeout;
          if (late && message->late.empty()) message->late = "Watchdog caught collective operation timeout";
          if (message->late.empty()) continue;
          signals = signals || !message->aborted;
          if (group->error_ == c10d::ErrorType::SUCCESS && !message->aborted)
            group->error_ = late ? c10d::ErrorType::TIMEOUT : c10d::ErrorType::COMM_ERROR;
          message->error = std::make_exception_ptr(std::runtime_error(message->late));
        }
        std::erase_if(group->watched_, [](const auto& message) { return message->over; });
      }
      if (!signals) continue;
      // Other ranks' watchdogs look at this key, but not those of `Nccl2`.
      if (!group->is_second()) try {
        group->store_->set("exception_dump", std::vector<uint8_t>(1, '1'));
      } catch (const std::exception& error) {
        fails(std::string("the watchdog called the store: ") + error.what());
      }
      std::lock_guard<std::mutex> hold(control().lock);
      if (control().ends_process) std::_Exit(6);
      for (auto& [_, one] : group->comms_) one->abort("the watchdog aborted it");
    }
  }
}

template <typename T>
c10::intrusive_ptr<T> Nccl::make(c10::intrusive_ptr<T> made) {
  std::lock_guard<std::mutex> hold(all().lock);
  all().groups.emplace(made.get(), c10::weak_intrusive_ptr<Nccl>(c10::intrusive_ptr<Nccl>(made)));
  if (!all().is_watched) std::thread(watch).detach();
  all().is_watched = true;
  return made;
}
Nccl::~Nccl() {
  // Python frees a group of torch, by its count or as garbage, with the interpreter's lock, and the communicator's thread
  // may be waiting for that lock to tell of memory that it frees: neither would continue.
  std::optional<py::gil_scoped_release> release;
  if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
  {
    std::lock_guard<std::mutex> hold(all().lock);
    all().groups.erase(this);
  }
  if (!shut_ && !comms_.empty()) {
    std::lock_guard<std::mutex> hold(control().lock);
    ++control().unclosed;
  }
  end("the group was destroyed", true);
  // What the communicators hold goes with them, whoever has the lock.
  release.reset();
}

bool NcclWork::wait(milliseconds timeout) {
  auto* guard = c10::impl::getDeviceGuardImpl(kDevice);
  auto& c = control();
  bool recorded = false;
  {
    std::lock_guard<std::mutex> hold(c.lock);
    if (message->error) std::rethrow_exception(message->error);
    TORCH_CHECK_WITH(DistBackendError, !(tells_of_aborts && message->aborted), "NCCL operation failed");
    recorded = message->recorded;
  }
  if (!recorded) return true;  // of a block that is open
  message->end.block(guard->getStream(device));
  stash.clear();
  auto groups = living();  // let go of after the lock
  std::unique_lock<std::mutex> hold(c.lock);
  // Operators run at once here, so what was sent before runs now. On a device the stream waits; where a message is held
  // back, the host continues with memory that never arrived.
  for (auto& group : groups)
    for (auto& [_, one] : group->comms_) {
      auto& queue = one->queue;
      auto found = std::find(queue.begin(), queue.end(), message);
      if (found == queue.end()) continue;
      if (std::any_of(queue.begin(), found + 1, [](const auto& m) { return m->held; })) return true;
      for (auto at = queue.begin(); at != found + 1; ++at) (*at)->may_run = true;
    }
  c.changed.notify_all();
  auto over = [&] { return message->over || c.is_over; };
  if (timeout.count() <= 0) c.changed.wait(hold, over);
  else if (!c.changed.wait_for(hold, timeout, over)) C10_THROW_ERROR(DistBackendError, "NCCL: Timed out waiting for " + message->kinds());
  // An abort while the stream waited is no error of this call: it returned long ago.
  return true;
}

template <typename T>
class Holder {  // as torch holds what may call Python when it ends
  c10::intrusive_ptr<T> held_;
 public:
  Holder() = default;
  Holder(const Holder&) = default;
  Holder(Holder&&) noexcept = default;
  Holder& operator=(const Holder&) = default;
  Holder& operator=(Holder&&) noexcept = default;
  Holder(c10::intrusive_ptr<T> held) : held_(std::move(held)) {}
  explicit Holder(T* held) : held_(c10::intrusive_ptr<T>::unsafe_steal_from_new(held)) {}
  ~Holder() {
    if (held_ && PyGILState_Check()) {
      pybind11::gil_scoped_release release;
      held_.reset();
    }
  }
  T& operator*() const noexcept { return *held_; }
  T* operator->() const noexcept { return held_.get(); }
  T* get() const noexcept { return held_.get(); }
  operator bool() const noexcept { return static_cast<bool>(held_); }
};

}  // namespace
PYBIND11_DECLARE_HOLDER_TYPE(T, Holder<T>, true)

PYBIND11_MODULE(simulated_nccl, m) {
  py::module_::import("torch");
  simulated_heard = &heard;
  auto group = py::class_<Nccl, Holder<Nccl>, Backend>(m, "ProcessGroupNCCL");
  py::class_<Config>(m, "NCCLConfig")
      .def(py::init<>())
      .def_readwrite("blocking", &Config::blocking)
      .def_readwrite("max_ctas", &Config::max_ctas)
      .def_readwrite("net_name", &Config::net_name);
  py::class_<NcclOptions, c10::intrusive_ptr<NcclOptions>, Backend::Options>(group, "Options")
      .def(py::init([](bool high) { return c10::make_intrusive<NcclOptions>(high); }), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream)
      .def_readwrite("config", &NcclOptions::config)
      .def_property("split_from", [](const NcclOptions& o) { return o.split_from; },
                    [](NcclOptions& o, c10::intrusive_ptr<Backend> from) { o.split_from = std::move(from); })
      .def_readwrite("split_color", &NcclOptions::split_color)
      .def_readwrite("lazy_init", &NcclOptions::lazy_init)
      .def_readwrite("global_ranks_in_group", &NcclOptions::global_ranks_in_group)
      .def_readwrite("group_name", &NcclOptions::group_name)
      .def("__deepcopy__", [](const NcclOptions& o, const py::dict&) { return c10::make_intrusive<NcclOptions>(o); });
  group
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<NcclOptions> options) {
             return Nccl::make(c10::make_intrusive<Nccl>(store, rank, size, std::move(options)));
           }), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), py::call_guard<py::gil_scoped_release>())
      .def("get_error", &Nccl::getError, py::call_guard<py::gil_scoped_release>())
      .def("_set_default_timeout", &Nccl::setTimeout, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", [](Nccl& g) { return g.options_; })
      .def("perform_nocolor_split", &Nccl::performNocolorSplit, py::call_guard<py::gil_scoped_release>());

  auto second = [&m, &group](auto* of, const char* name) {
    using Kind = std::remove_pointer_t<decltype(of)>;
    py::class_<Kind, Holder<Kind>, Backend> made(m, name);
    made.attr("Options") = group.attr("Options");
    made.def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<NcclOptions> options,
                         std::optional<c10::Device> device) {
              auto one = Nccl::make(c10::make_intrusive<Kind>(store, rank, size, std::move(options)));
              if (device) one->bind(device);
              return one;
            }), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("device_id") = py::none(),
            py::call_guard<py::gil_scoped_release>())
        .def("get_error", [](Kind& g) { return g.getError(); }, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("options", [](Kind& g) { return g.options_; })
        .def("perform_nocolor_split", [](Kind& g, c10::Device device) { g.performNocolorSplit(device); },
             py::call_guard<py::gil_scoped_release>())
        // torch calls it from C++ (`ProcessGroup.split_group`) or by `Backend.split`, which Python does not have everywhere.
        .def("split", [](Kind& g, const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                         c10::intrusive_ptr<NcclOptions> options) { return g.split(store, ranks, options); },
             py::call_guard<py::gil_scoped_release>());
  };
  second(static_cast<Nccl2*>(nullptr), "ProcessGroupNCCL2");
  second(static_cast<NcclLazy*>(nullptr), "ProcessGroupNCCLLazy");

  auto flag = [&m](const char* name, bool Control::*at) {
    m.def(name, [at](bool value) {
      std::lock_guard<std::mutex> hold(control().lock);
      control().*at = value;
      control().changed.notify_all();
    });
  };
  flag("premultiplies", &Control::premultiplies);
  flag("notices_peers", &Control::notices_peers);
  flag("stays_connecting", &Control::stays_connecting);
  flag("ends_process", &Control::ends_process);
  auto count = [&m](const char* name, int Control::*at) {
    m.def(name, [at] {
      std::lock_guard<std::mutex> hold(control().lock);
      return control().*at;
    });
  };
  count("made", &Control::made);
  count("splits", &Control::splits);
  count("launches", &Control::launches);
  count("unclosed", &Control::unclosed);
  m.def("failures", [] {
    std::lock_guard<std::mutex> hold(control().lock);
    return control().failures;
  });
  m.def("lazily_made", [] {
    std::lock_guard<std::mutex> hold(control().lock);
    return control().lazily;
  });
  m.def("devices", [] {
    std::lock_guard<std::mutex> hold(control().lock);
    return control().devices;
  });
  m.def("begin", [](int seed, py::object frames) {
    std::lock_guard<std::mutex> hold(control().lock);
    auto& c = control();
    c.draws.seed(seed);
    c.failures.clear(), c.held.clear(), c.failing.clear();
    c.is_over = c.notices_peers = c.stays_connecting = c.ends_process = false;
    c.premultiplies = true;
    c.lazily.clear(), c.devices.clear();
    c.made = c.splits = c.unclosed = c.launches = 0;
    if (!c.frames) c.frames = new py::object(std::move(frames));
  });
  m.def("hold", [](std::vector<std::string> kinds) {
    std::lock_guard<std::mutex> hold(control().lock);
    control().held.insert(kinds.begin(), kinds.end());
  });
  m.def("fail", [](std::vector<std::string> kinds, int after) {
    std::lock_guard<std::mutex> hold(control().lock);
    control().failing = {kinds.begin(), kinds.end()};
    return std::exchange(control().passing, after);
  });
  auto held = [](bool lets_go) {
    bool any = false;
    auto groups = living();
    std::lock_guard<std::mutex> hold(control().lock);
    for (auto& group : groups)
      for (auto& [_, one] : group->comms_)
        for (auto& message : one->queue) {
          any = any || message->held;
          if (lets_go && message->held) message->held = false, message->may_run = true;
        }
    if (lets_go) control().held.clear();
    control().changed.notify_all();
    return any;
  };
  m.def("any_held", [held] { return held(false); }, py::call_guard<py::gil_scoped_release>());
  m.def("let_go", [held] { held(true); }, py::call_guard<py::gil_scoped_release>());
  m.def("alive", [] {
    int n = 0;
    for (auto& group : living()) for (auto& [_, one] : group->comms_) n += !one->aborted;
    return n;
  }, py::call_guard<py::gil_scoped_release>());
  m.def("end", [] {
    // What was sent runs on all ranks or on none, and threads that wait for ever end.
    auto groups = living();
    {
      std::unique_lock<std::mutex> hold(control().lock);
      for (auto& group : groups)
        for (auto& [_, one] : group->comms_)
          for (auto& message : one->queue) message->held = false, message->may_run = true;
      control().changed.notify_all();
      control().changed.wait_for(hold, milliseconds(5000), [&] { return control().queued <= 0; });
      control().is_over = true;
      control().changed.notify_all();
    }
    for (auto& group : groups) group->abort();
    groups.clear();
  }, py::call_guard<py::gil_scoped_release>());
}
