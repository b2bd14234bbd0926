// out = gelu_tanh(g)·u
//
//   g, u [N] float32 → out [N] float32, N a multiple of 4
//
// One thread for four elements. Rounding: float32 throughout (gelu.h has the formula).
const uint at = 4 * thread_position_in_grid.x;

store4(out + at, gelu_tanh(load4(g + at)) * load4(u + at));
