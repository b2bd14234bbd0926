// out = gelu_tanh(g)·u,  gelu_tanh(g) = ½·g·(1 + tanh z) = g / (1 + exp(−2z)),  z = √(2/π)·(g + 0.044715·g³)
//
//   g, u [N] float32 → out [N] float32, N a multiple of 4
//
// One thread for four elements. The form with one exp is right in both tails: exp overflows to ∞ and g/∞ is −0.
// Rounding: float32 throughout.
const uint at = 4 * thread_position_in_grid.x;

const float4 gate = load4(g + at);
const float4 z = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
store4(out + at, gate / (1.0f + precise::exp(-2.0f * z)) * load4(u + at));
