// Which keys a query row meets: those of its bounds (attention_bounds.metal) that hold a token within its window.
#include <metal_stdlib>
using namespace metal;

template <typename P>
METAL_FUNC bool meets(int key, int position, int lo, int hi, int window, P positions) {
  return key >= lo && key < hi && positions[key] >= 0 && abs(position - positions[key]) <= window;
}
