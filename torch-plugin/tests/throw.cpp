// What a C++ caller sees of millpond_malloc where there is no memory. usage: throw LIBRARY [LIBRARY OF TORCH'S ...]
#include <cstdio>
#include <cstring>
#include <cxxabi.h>
#include <dlfcn.h>
#include <exception>
#include <stdexcept>
#include <typeinfo>

static const char *caught(void *(*allocate)(size_t, int, void *), char *text, size_t room) {
  try {
    allocate(size_t(1) << 50, -1, nullptr);
  } catch (const std::exception &e) {
    std::snprintf(text, room, "%s", e.what());
    return typeid(e).name();
  }
  return "nothing";
}

int main(int count, char **words) {
  for (int i = 2; i < count; i++)
    if (!dlopen(words[i], RTLD_LAZY | RTLD_GLOBAL)) std::printf("not loaded: %s\n", dlerror());
  void *library = dlopen(words[1], RTLD_LAZY);
  if (!library) return std::printf("%s\n", dlerror()), 2;
  auto allocate = (void *(*)(size_t, int, void *))dlsym(library, "millpond_malloc");
  auto control = (char *(*)(const char *))dlsym(library, "millpond_control");
  auto last_error = (const char *(*)())dlsym(library, "millpond_last_error");
  char text[4096] = "";
  std::printf("detached: %s", caught(allocate, text, sizeof text));
  std::printf(" says %.60s\n", text);
  char *served = control("{\"op\":\"serve_inline\",\"driver\":\"host\"}");
  if (!served) return std::printf("%s\n", last_error()), 3;
  char socket[512] = "", key[512] = "", request[2048];
  std::sscanf(std::strstr(served, "\"key\":\"") + 7, "%500[^\"]", key);
  std::sscanf(std::strstr(served, "\"socket\":\"") + 10, "%500[^\"]", socket);
  std::snprintf(request, sizeof request, "{\"op\":\"attach\",\"socket\":\"%s\",\"key\":\"%s\",\"role\":\"parent\"}", socket, key);
  if (!control(request)) return std::printf("%s\n", last_error()), 4;
  for (int turn = 0; turn < 3; turn++) {
    std::printf("out of memory: %s", caught(allocate, text, sizeof text));
    std::printf(" says %.40s\n", text);
  }
  std::printf("and then: %s\n", allocate(4096, -1, nullptr) ? "memory" : "none");
  control("{\"op\":\"detach\"}");
  control("{\"op\":\"stop_inline\"}");
}
