// Atomics, relaxed as CUDA's are: they order nothing but themselves. Each gives the value before it.
#pragma once
#include <type_traits>

namespace simt {

// *at = next(*at) in one step.
template <class T, class Next>
T update(T* at, Next next) {
    T before, after;
    __atomic_load(at, &before, __ATOMIC_RELAXED);
    do after = next(before);
    while (!__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

// The type of a second argument, which does not take part in deducing T.
template <class T>
using Same = typename std::common_type<T>::type;

}  // namespace simt

template <class T>
T atomicAdd(T* at, simt::Same<T> value) {
    if constexpr (std::is_integral_v<T>)
        return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
    else
        return simt::update(at, [=](T old) { return old + value; });
}

template <class T>
T atomicMax(T* at, simt::Same<T> value) {
    return simt::update(at, [=](T old) { return old < value ? value : old; });
}

template <class T>
T atomicMin(T* at, simt::Same<T> value) {
    return simt::update(at, [=](T old) { return value < old ? value : old; });
}

template <class T>
T atomicOr(T* at, simt::Same<T> value) {
    return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}

template <class T>
T atomicExch(T* at, simt::Same<T> value) {
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}

template <class T>
T atomicCAS(T* at, simt::Same<T> compare, simt::Same<T> value) {
    __atomic_compare_exchange_n(at, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return compare;
}
