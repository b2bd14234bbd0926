"""What a forward costs, counted: launches, multiplications, bytes, and the time that a GPU's limits leave for them.

    devices     the GPUs, by their published figures
    work        what each kernel of `metal_src/` does, in closed form; tests hold it against the simulator's counters
    seed        the same for the kernels that this project started from
    plans       the launches of a whole text forward: ours, the seed's, plain MLX operations
    roofline    the time of a launch on a device

Nothing here was timed: no Apple GPU was at hand. Differences between plans are differences of counted work.
"""
