"""exp, tanh and erf (within 1.4 units in the last place), sigmoid (2.4) and the activations, of 16 float32 at once.

Made of +, *, / and fma in a fixed order, never of a mathematics library, so that every machine gets the same bits. The
coefficients are minimax fits of our own (Remez in 40 digits, weighted for the relative error of the result).
"""

from __future__ import annotations

from numba import float32

from slicing.fast import records as r
from slicing.fast.compiling import inner
from slicing.fast.vectors import (
    MAGIC,
    fma,
    lane_numbers,
    larger,
    magnitude,
    scaled,
    spread,
    where_less,
    with_sign,
)

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693145751953125  # the leading 16 bits of ln 2, so that its product with a whole number is exact
LN2_LOW = 1.428606820309417e-06
EXP_LOWEST, EXP_HIGHEST = -110.0, 89.0  # beyond them exp is exactly 0 and infinite in float32
TANH_SMALL, TANH_LARGE = 0.625, 10.0  # below: a polynomial; above, tanh is 1 in float32
ERF_SMALL, ERF_LARGE = 1.0, 4.0
SQRT_HALF = 0.7071067811865476
SQRT_2_OVER_PI = 0.7978845608028654
GELU_CUBIC = 0.044715
QUICK_GELU = 1.702


@inner
def number(value):  # type: ignore[no-untyped-def]
    """Return sixteen lanes of a constant."""
    return spread(float32(value))


@inner
def exp(x):  # type: ignore[no-untyped-def]
    """Return e**x. exp(-inf) is exactly 0; NaN stays."""
    x = where_less(x, number(EXP_LOWEST), number(EXP_LOWEST), x)
    x = where_less(number(EXP_HIGHEST), x, number(EXP_HIGHEST), x)
    rounded = fma(x, number(LOG2_E), number(MAGIC))
    n = rounded - number(MAGIC)
    rest = fma(n, number(-LN2_HIGH), x)
    rest = fma(n, number(-LN2_LOW), rest)  # x - n ln 2, in [-0.35, 0.35]
    p = number(0.001395049155689776)
    p = fma(p, rest, number(0.008368889801204205))
    p = fma(p, rest, number(0.04166620597243309))
    p = fma(p, rest, number(0.166665181517601))
    p = fma(p, rest, number(0.5))
    p = fma(p, rest * rest, rest)
    return scaled(p + number(1.0), rounded)


@inner
def sigmoid(x):  # type: ignore[no-untyped-def]
    """Return 1 / (1 + e**-x)."""
    return number(1.0) / (number(1.0) + exp(-x))


@inner
def tanh(x):  # type: ignore[no-untyped-def]
    """Return the hyperbolic tangent."""
    size = magnitude(x)
    square = x * x
    p = number(0.0021475425455719233)
    p = fma(p, square, number(-0.008182680234313011))
    p = fma(p, square, number(0.021702969446778297))
    p = fma(p, square, number(-0.05394720658659935))
    p = fma(p, square, number(0.13333210349082947))
    p = fma(p, square, number(-0.3333333134651184))
    small = fma(p * square, x, x)
    bounded = where_less(number(TANH_LARGE), size, number(TANH_LARGE), size)
    large = number(1.0) - number(2.0) / (exp(bounded + bounded) + number(1.0))
    return where_less(size, number(TANH_SMALL), small, with_sign(large, x))


@inner
def erf(x):  # type: ignore[no-untyped-def]
    """Return the error function."""
    size = magnitude(x)
    square = x * x
    p = number(7.889124390203506e-05)
    p = fma(p, square, number(-0.0008020842797122896))
    p = fma(p, square, number(0.005189535673707724))
    p = fma(p, square, number(-0.026854444295167923))
    p = fma(p, square, number(0.11283600330352783))
    p = fma(p, square, number(-0.3761262595653534))
    p = fma(p, square, number(0.12837916612625122))
    small = fma(p, x, x)
    t = where_less(number(ERF_LARGE), size, number(ERF_LARGE), size)
    q = number(1.0763495083665475e-05)
    q = fma(q, t, number(-0.00031806284096091986))
    q = fma(q, t, number(0.003622931195423007))
    q = fma(q, t, number(-0.023720212280750275))
    q = fma(q, t, number(0.10618764162063599))
    q = fma(q, t, number(0.6351814866065979))
    q = fma(q, t, number(0.12864096462726593))
    large = number(1.0) - exp(-fma(q, t, t))
    return where_less(size, number(ERF_SMALL), small, with_sign(large, x))


@inner
def silu(x):  # type: ignore[no-untyped-def]
    """Return x * sigmoid(x)."""
    return x / (number(1.0) + exp(-x))


@inner
def gelu(x):  # type: ignore[no-untyped-def]
    """Return x * (1 + erf(x / sqrt 2)) / 2."""
    return number(0.5) * x * (number(1.0) + erf(x * number(SQRT_HALF)))


@inner
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    """Return the GELU that is approximated through tanh."""
    inner = number(SQRT_2_OVER_PI) * fma(number(GELU_CUBIC) * x * x, x, x)
    return number(0.5) * x * (number(1.0) + tanh(inner))


@inner
def activated(x, activation, alpha):  # type: ignore[no-untyped-def]
    """Return the activation of that number (see `records`); alpha is what OSS_SWIGLU multiplies its sigmoid's by."""
    if activation == r.SILU:
        return silu(x)
    if activation == r.GELU_TANH:
        return gelu_tanh(x)
    if activation == r.GELU:
        return gelu(x)
    if activation == r.TANH:
        return tanh(x)
    if activation == r.SIGMOID:
        return sigmoid(x)
    if activation == r.OSS_SWIGLU:
        return x * sigmoid(x * alpha)
    if activation == r.QUICK_GELU:
        return x * sigmoid(x * number(QUICK_GELU))
    positive = larger(x, number(0.0))
    return positive * positive if activation == r.RELU2 else positive


@inner
def capped(x, cap):  # type: ignore[no-untyped-def]
    """Return tanh(x / cap) * cap."""
    return tanh(x / cap) * cap


@inner
def first_lanes(value, count, other):  # type: ignore[no-untyped-def]
    """Return the first `count` lanes of a value, then those of the other."""
    return where_less(lane_numbers(), spread(float32(count)), value, other)
