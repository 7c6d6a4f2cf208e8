// The exchange of parts between the ranks of a tensor-parallel group in a pass, over one connected socket for each other rank.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0  // on macOS; Python ignores the signal
#endif

namespace outrider {

// The error for a rank that has closed its connection or sends nothing.
struct RankGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Exchange {
 public:
  // `sockets`: to each rank, in their order; the entry of this rank is not used. The caller keeps and closes them.
  Exchange(std::vector<int> sockets, int rank, double timeout_s)
      : sockets_(std::move(sockets)), rank_(rank), timeout_(timeout_s), received_(sockets_.size()) {}

  int ranks() const { return int(sockets_.size()); }
  int rank() const { return rank_; }
  double seconds() const { return seconds_; }  // spent in exchanges so far, waiting for computing ranks included

  // Replaces x by the sum of all ranks' x, for two ranks or more. Adds in the order of ranks: the same bits on every rank for any `count`.
  void sum(float* x, size_t count) {
    std::vector<Part> parts;
    for (int rank = 0; rank < ranks(); rank++)
      if (rank != rank_) parts.push_back({rank, x, count * sizeof(float), place(rank, count), count * sizeof(float)});
    transfer(parts);
    own_.assign(x, x + count);
    const auto part = [&](int rank) { return rank == rank_ ? own_.data() : received_[rank].data(); };
    const float *const first = part(0), *const second = part(1);
    for (size_t i = 0; i < count; i++) x[i] = first[i] + second[i];
    for (int rank = 2; rank < ranks(); rank++) {
      const float* const more = part(rank);
      for (size_t i = 0; i < count; i++) x[i] += more[i];
    }
  }

  // Sends x to rank 0, which receives that of every other rank; see `part`.
  void collect(const float* x, size_t count) {
    std::vector<Part> parts;
    if (rank_) parts.push_back({0, x, count * sizeof(float), nullptr, 0});
    for (int rank = 1; rank < ranks() && !rank_; rank++)
      parts.push_back({rank, nullptr, 0, place(rank, count), count * sizeof(float)});
    transfer(parts);
  }

  // The x that rank 0 has received from another rank.
  const float* part(int rank) const { return received_[rank].data(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds SPIN{50};  // before a thread sleeps; longer would take a core from other ranks

  // The remaining bytes to send to one rank and to receive from it.
  struct Part {
    int rank;
    const void* out;
    size_t to_send;
    void* in;
    size_t to_receive;
  };

  float* place(int rank, size_t count) {
    if (received_[rank].size() < count) received_[rank].resize(count);
    return received_[rank].data();
  }

  // Sends and receives at the same time, so that no two ranks wait for each other to read. Throws RankGone. All later calls
  // throw it at once, because after an incomplete message no following one could be read.
  void transfer(std::vector<Part>& parts) {
    if (broken_) throw RankGone("the group has ended");
    broken_ = true;
    const auto began = Clock::now();
    auto moved = began;
    while (step(parts)) {
      const auto now = Clock::now();
      if (progressed_) moved = now;
      else if (now - moved > timeout_) throw RankGone(silent(parts));
      else if (now - moved > SPIN) sleep(parts);
    }
    seconds_ += std::chrono::duration<double>(Clock::now() - began).count();
    broken_ = false;
  }

  // Sends and receives as much as possible without waiting. Returns whether bytes remain.
  bool step(std::vector<Part>& parts) {
    progressed_ = false;
    bool left = false;
    for (Part& it : parts) {
      if (it.to_send) advance(it.rank, it.out, it.to_send, send(sockets_[it.rank], it.out, it.to_send, MSG_DONTWAIT | MSG_NOSIGNAL));
      if (it.to_receive) {
        const ssize_t count = recv(sockets_[it.rank], it.in, it.to_receive, MSG_DONTWAIT);
        if (!count) throw RankGone("rank " + std::to_string(it.rank) + " has closed its connection");
        advance(it.rank, it.in, it.to_receive, count);
      }
      left = left || it.to_send || it.to_receive;
    }
    return left;
  }

  template <class Data>
  void advance(int rank, Data*& data, size_t& left, ssize_t count) {
    if (count < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return;
      throw RankGone("rank " + std::to_string(rank) + ": " + std::strerror(errno));
    }
    using Bytes = std::conditional_t<std::is_const_v<Data>, const char, char>;
    data = static_cast<Bytes*>(data) + count;
    left -= size_t(count);
    progressed_ = progressed_ || count;
  }

  void sleep(const std::vector<Part>& parts) const {
    std::vector<pollfd> waits;
    for (const Part& it : parts)
      if (it.to_send || it.to_receive)
        waits.push_back({sockets_[it.rank], short((it.to_send ? POLLOUT : 0) | (it.to_receive ? POLLIN : 0)), 0});
    poll(waits.data(), nfds_t(waits.size()), 1000);
  }

  static std::string silent(const std::vector<Part>& parts) {
    for (const Part& it : parts)
      if (it.to_send || it.to_receive) return "rank " + std::to_string(it.rank) + " does not answer";
    return "";
  }

  std::vector<int> sockets_;
  int rank_;
  std::chrono::duration<double> timeout_;
  std::vector<std::vector<float>> received_;  // parts of each rank in the last exchange
  std::vector<float> own_;
  double seconds_ = 0.0;
  bool progressed_ = false;
  bool broken_ = false;
};

}  // namespace outrider
