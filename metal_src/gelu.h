// gelu_tanh(g) = ½·g·(1 + tanh z) = g / (1 + exp(−2z)),  z = √(2/π)·(g + 0.044715·g³)
//
// The form with one exp is right in both tails: exp overflows to ∞ and g/∞ is −0.
template <typename V>
METAL_FUNC V gelu_tanh(V g) {
  const V z = 0.7978845608f * (g + 0.044715f * g * g * g);
  return g / (1.0f + precise::exp(-2.0f * z));
}
