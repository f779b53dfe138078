"""Elementary functions of float32 in kernels, to a few roundings, and a faster logistic function."""

from deltazoo.ops.fused.optional_triton import tl, triton


@triton.jit
def sigmoid(x, HALF: tl.constexpr):
    """`1 / (1 + exp(-x))` of float32 values; with HALF exact to a few roundings of float32, for results in half.

    HALF takes five instructions instead of twelve, since it does not guard `exp` and the division against subnormals.
    """
    if HALF:
        root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))  # log2(e)
        return root * root
    return tl.sigmoid(x)


@triton.jit
def exponential(x):
    """`exp(x)`, x <= 0, to a rounding of float32; 0 below the normal numbers of float32.

    r|r| <= log(2) / 2, by its Taylor series. `exp2` of the device errs by two roundings.
    """
    x = tl.where(x < -88.0, -88.0, x)  # and NaN stays
    n = tl.floor(tl.fma(x, 1.4426950408889634, 0.5))  # log2(e)
    r = tl.fma(n, -0.693145751953125, x)  # log(2) in two parts: n times the first part is exact
    r = tl.fma(n, -1.4286068203094173e-06, r)
    series = 1 / 5040
    series = tl.fma(r, series, 1 / 720)
    series = tl.fma(r, series, 1 / 120)
    series = tl.fma(r, series, 1 / 24)
    series = tl.fma(r, series, 1 / 6)
    series = tl.fma(r, series, 0.5)
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return power * tl.fma(r * r, series, r + 1)


@triton.jit
def logistic(x):
    """`1 / (1 + exp(-x))`, 1 minus it, and its root, each to a few roundings of float32 however small it is."""
    root = exponential(-tl.abs(x) / 2)
    e = root * root
    inverse = 1 / (1 + e)
    return (
        tl.where(x < 0, e, 1.0) * inverse,
        tl.where(x < 0, 1.0, e) * inverse,
        tl.where(x < 0, root, 1.0) * tl.sqrt(inverse),
    )


@triton.jit
def _quotient(x, y):
    """`x / y` to a rounding, for y from 1 to 3: the device's own division errs by two."""
    reciprocal = 1 / y
    quotient = x * reciprocal
    return tl.fma(tl.fma(-quotient, y, x), reciprocal, quotient)


@triton.jit
def softplus(x):
    """`log(1 + exp(x))` and its derivative, the logistic function, to a few roundings of float32.

    With e = exp(-|x|) it is max(x, 0) + log(1 + e), and log(1 + e) = 2 artanh(e / (2 + e)), a series in odd powers of
    at most 1/3. The logarithm of a sum near 1 would lose the small steps that models start from.
    """
    e = exponential(-tl.abs(x))
    s = _quotient(e, 2 + e)
    t = s * s
    series = 1 / 15
    series = tl.fma(t, series, 1 / 13)
    series = tl.fma(t, series, 1 / 11)
    series = tl.fma(t, series, 1 / 9)
    series = tl.fma(t, series, 1 / 7)
    series = tl.fma(t, series, 1 / 5)
    series = tl.fma(t, series, 1 / 3)
    log = 2 * tl.fma(s * t, series, s)
    return tl.maximum(x, 0.0) + log, _quotient(tl.where(x >= 0, 1.0, e), 1 + e)


@triton.jit
def exponential_minus_1(x):
    """`exp(x) - 1`, x <= 0, to a few roundings: near 0, where the difference loses digits, by its Taylor series."""
    series = 1 / 3628800
    series = tl.fma(x, series, 1 / 362880)
    series = tl.fma(x, series, 1 / 40320)
    series = tl.fma(x, series, 1 / 5040)
    series = tl.fma(x, series, 1 / 720)
    series = tl.fma(x, series, 1 / 120)
    series = tl.fma(x, series, 1 / 24)
    series = tl.fma(x, series, 1 / 6)
    series = tl.fma(x, series, 0.5)
    return tl.where(x > -1.0, tl.fma(x * x, series, x), exponential(x) - 1)
