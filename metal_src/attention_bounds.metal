// bounds[t] = [lo, hi): the packed rows that row t may meet, a superset of those within its window
//
//   lo = max(start, t − window),  hi = min(stop, t + window + 1)  in the segment [start, stop) of t;
//   lo = hi = t for a row of no segment. Both grow with t.
//
//   segments [S, 2] (start, length) int32, starts ascending, window int32 → bounds [T, 2] int32
//
// One thread a row, a binary search each. Positions grow by at least 1 from row to row of a segment, so as many rows
// hold every key within the window.
const int row = thread_position_in_grid.x, rows = threads_per_grid.x;

// The last segment that starts at or before this row; empty ones of the same start come first.
int first = 0, count = segments_shape[0];
while (count > 0) {
  const int half_count = count / 2;
  const bool before = segments[2 * (first + half_count)] <= row;
  first = before ? first + half_count + 1 : first;
  count = before ? count - half_count - 1 : half_count;
}
int start = 0, stop = 0;
if (first > 0) {
  start = max(segments[2 * first - 2], 0);
  stop = min(start + max(segments[2 * first - 1], 0), rows);
}
const bool inside = row < stop;
bounds[2 * row] = inside ? max(start, row - window) : row;
bounds[2 * row + 1] = inside ? min(stop, min(row, rows - window - 1) + window + 1) : row;
