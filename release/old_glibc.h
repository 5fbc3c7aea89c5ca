// Included first in every source that goes into a wheel (`c++ -include`), so that the result asks for no symbol that is newer
// than glibc 2.28 and GCC 8, whatever this machine has.
//
// - Names that libstdc++'s headers refer to, and that older libraries lack, are defined here, in each library for itself.
// - Names that glibc 2.34 moved into libc are taken by their old versions, which newer systems have as well.
#pragma once

#include <bits/c++config.h>
// Waits by a clock of the caller's choice are of glibc 2.30.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK

#include <new>

#define SMD_OWN __attribute__((weak, visibility("hidden")))

// Of glibc 2.32: whether reference counts can do without atomic operations. Zero says no.
extern "C" SMD_OWN char __libc_single_threaded = 0;

namespace std {
// Of GCC 11.
[[noreturn]] SMD_OWN void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
} // namespace std

__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver dlclose,dlclose@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
__asm__(".symver pthread_once,pthread_once@GLIBC_2.2.5");
