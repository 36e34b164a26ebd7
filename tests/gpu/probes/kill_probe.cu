// How long after SIGKILL a process with queued GPU work is gone, by how many hardware queues its context has.
//
// build: g++ -O2 -x c++ kill_probe.cu -o kill_probe -ldl   (or nvcc; it needs no header of CUDA's and loads libcuda.so.1 itself)
// usage: kill_probe [--queues 8,12,16,20,24,32] [--work memset2000,spin] [--repeats 3]
//                   [--gib 8] [--window-gib 0] [--streams 1] [--registered] [--threads]
//   --queues      CUDA_DEVICE_MAX_CONNECTIONS of the process that is killed
//   --work        idle, spin (one kernel that runs on), memsetN (N fills of all its memory are queued)
//   --window-gib  addresses reserved (0: as many as it maps); --registered: 512 KiB of a memfd are registered;
//   --threads     two more threads
// Prints one line of JSON a kill: {"queues","work","repeat","pidfd_ms","socket_ms"}, then one for each pair with the medians and the
// largest, then {"done":true}. Each kill has a bound of 10 s: "timeout":true. It starts at most one process at a time.
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

using Clock = std::chrono::steady_clock;
static double since(Clock::time_point from) { return std::chrono::duration<double, std::milli>(Clock::now() - from).count(); }

// As cuda.h has them.
struct Location { int type, id; };
struct Properties {
    int type, handle_types;
    Location location;
    void *win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
};
struct Access { Location location; int flags; };
static_assert(sizeof(Properties) == 32 && sizeof(Access) == 12, "layout of cuda.h");

static void *library() {
    static void *found = dlopen("libcuda.so.1", RTLD_NOW);
    return found;
}

template <class... A> static void call(const char *name, A... arguments) {
    auto function = reinterpret_cast<int (*)(A...)>(library() ? dlsym(library(), name) : nullptr);
    int result = function ? function(arguments...) : -1;
    if (result) {
        printf("{\"error\": \"%s: %d\"}\n", name, result);
        fflush(stdout);
        _exit(3);
    }
}

// Runs for so many cycles of its multiprocessor.
static const char *SPIN = R"(.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
    .reg .u64 %t<4>;
    .reg .pred %p;
    ld.param.u64 %t0, [cycles];
    mov.u64 %t1, %clock64;
again:
    mov.u64 %t2, %clock64;
    sub.u64 %t3, %t2, %t1;
    setp.lt.u64 %p, %t3, %t0;
    @%p bra again;
    ret;
}
)";

struct Options {
    std::vector<std::string> queues{"8", "12", "16", "20", "24", "32"}, work{"memset2000", "spin"};
    int repeats = 3, streams = 1;
    size_t gib = 8, window_gib = 0;
    bool registered = false, threads = false;
};

static void doomed(const Options &o, const std::string &queues, const std::string &work, int socket) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues.c_str(), 1);
    int device;
    void *context;
    call("cuInit", 0u);
    call("cuDeviceGet", &device, 0);
    call("cuDevicePrimaryCtxRetain", &context, device);
    call("cuCtxSetCurrent", context);
    const size_t gib = size_t(1) << 30, bytes = o.gib * gib, window = std::max(o.window_gib, o.gib) * gib;
    uint64_t base;
    call("cuMemAddressReserve", &base, window, size_t(0), uint64_t(0), 0ull);
    Properties properties{};
    properties.type = 1;            // pinned
    properties.handle_types = 1;    // POSIX descriptor
    properties.location = {1, 0};   // device 0
    for (size_t n = 0; n < o.gib; n++) {
        unsigned long long handle;
        call("cuMemCreate", &handle, gib, (const Properties *)&properties, 0ull);
        call("cuMemMap", base + n * gib, gib, size_t(0), handle, 0ull);
        call("cuMemRelease", handle);
    }
    Access access{{1, 0}, 3};
    call("cuMemSetAccess", base, bytes, (const Access *)&access, size_t(1));
    if (o.registered) {
        int file = int(syscall(SYS_memfd_create, "words", 0));
        if (ftruncate(file, 1 << 20)) _exit(4);
        void *words = mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        call("cuMemHostRegister_v2", words, size_t(512 << 10), 3u);
    }
    if (o.threads)
        for (int n = 0; n < 2; n++) std::thread([] { pause(); }).detach();
    std::vector<void *> streams(size_t(std::max(1, o.streams)));
    for (auto &stream : streams) call("cuStreamCreate", &stream, 1u);
    if (work == "spin") {
        void *module, *kernel;
        unsigned long long cycles = 100000000000ull;
        void *parameters[] = {&cycles};
        call("cuModuleLoadData", &module, (const void *)SPIN);
        call("cuModuleGetFunction", &kernel, module, "spin");
        call("cuLaunchKernel", kernel, 1u, 1u, 1u, 32u, 1u, 1u, 0u, streams[0], (void **)parameters, (void **)nullptr);
    } else if (work.rfind("memset", 0) == 0) {
        int count = atoi(work.c_str() + 6);
        for (int n = 0; n < count; n++) call("cuMemsetD8Async", base, (unsigned char)n, bytes, streams[size_t(n) % streams.size()]);
    }
    char ready = 'g';
    if (write(socket, &ready, 1) != 1) _exit(5);
    alarm(60);  // nobody may kill it, but nothing stays behind
    pause();
    _exit(0);
}

struct Times { double pidfd = -1, socket = -1; };

static Times kill_one(const Options &o, const std::string &queues, const std::string &work) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) exit(1);
    pid_t child = fork();
    if (!child) {
        close(ends[0]);
        doomed(o, queues, work, ends[1]);
    }
    close(ends[1]);
    Times times;
    char ready;
    pollfd up{ends[0], POLLIN, 0};
    if (poll(&up, 1, 60000) != 1 || read(ends[0], &ready, 1) != 1) {
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        close(ends[0]);
        return times;
    }
    usleep(50000);  // its work is under way
    int process = int(syscall(SYS_pidfd_open, child, 0));
    auto start = Clock::now();
    kill(child, SIGKILL);
    while ((times.pidfd < 0 || times.socket < 0) && since(start) < 10000) {
        // What has been seen is no longer looked at: it would stay ready.
        pollfd fds[2] = {{times.pidfd < 0 ? process : -1, POLLIN, 0}, {times.socket < 0 ? ends[0] : -1, POLLIN, 0}};
        poll(fds, 2, 100);
        if (fds[0].revents) times.pidfd = since(start);
        if (fds[1].revents) times.socket = since(start);
    }
    if (times.pidfd >= 0) waitpid(child, nullptr, 0);
    close(ends[0]);
    close(process);
    return times;
}

static std::vector<std::string> split(const char *text) {
    std::vector<std::string> words;
    std::stringstream stream(text);
    for (std::string word; std::getline(stream, word, ',');) words.push_back(word);
    return words;
}

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? -1 : values[values.size() / 2];
}

int main(int argc, char **argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    Options o;
    for (int n = 1; n < argc; n++) {
        std::string flag = argv[n];
        if (flag == "--registered") { o.registered = true; continue; }
        if (flag == "--threads") { o.threads = true; continue; }
        const char *value = n + 1 < argc ? argv[++n] : "";
        if (flag == "--queues") o.queues = split(value);
        else if (flag == "--work") o.work = split(value);
        else if (flag == "--repeats") o.repeats = atoi(value);
        else if (flag == "--streams") o.streams = atoi(value);
        else if (flag == "--gib") o.gib = size_t(atoi(value));
        else if (flag == "--window-gib") o.window_gib = size_t(atoi(value));
        else { fprintf(stderr, "unknown flag %s; the head of kill_probe.cu says what there is\n", flag.c_str()); return 2; }
    }
    if (!library()) { printf("{\"error\": \"no CUDA driver: %s\"}\n", dlerror()); return 3; }
    for (const auto &work : o.work)
        for (const auto &queues : o.queues) {
            std::vector<double> pidfd, socket;
            for (int repeat = 0; repeat < o.repeats; repeat++) {
                Times t = kill_one(o, queues, work);
                bool whole = t.pidfd >= 0 && t.socket >= 0;
                printf("{\"queues\": %s, \"work\": \"%s\", \"repeat\": %d, \"pidfd_ms\": %.1f, \"socket_ms\": %.1f%s}\n", queues.c_str(), work.c_str(),
                       repeat, t.pidfd, t.socket, whole ? "" : ", \"timeout\": true");
                if (whole) { pidfd.push_back(t.pidfd); socket.push_back(t.socket); }
            }
            double largest = socket.empty() ? -1 : *std::max_element(socket.begin(), socket.end());
            printf("{\"queues\": %s, \"work\": \"%s\", \"kills\": %zu, \"pidfd_ms_median\": %.1f, \"socket_ms_median\": %.1f, \"socket_ms_max\": %.1f}\n",
                   queues.c_str(), work.c_str(), socket.size(), median(pidfd), median(socket), largest);
        }
    printf("{\"done\": true}\n");
    return 0;
}
