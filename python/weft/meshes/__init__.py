"""Objects over the ranks of a mesh: layouts, halos and windows, sharded tensors, gradients. `weft` gives
all of it by its own names."""
