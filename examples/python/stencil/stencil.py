"""Heat on a plate whose rows are divided over the ranks: in each step a rank needs one row of each neighbour,
its halo. The rank computes the rows that need no halo during the exchange. The result has the same bits as on
one rank."""
import numpy as np
import weft

ROWS, COLUMNS, STEPS = 60, 64, 100


def step(cells, new, rows):
    """Each cell of these rows moves towards the mean of its four neighbours. The first and the last column
    keep their heat."""
    begin, end = rows
    here = cells[begin:end, 1:-1]
    around = cells[begin - 1:end - 1, 1:-1] + cells[begin + 1:end + 1, 1:-1] + cells[begin:end, :-2] + cells[begin:end, 2:]
    new[begin:end, 1:-1] = here + 0.2 * (around - 4 * here)


group = weft.Context().group()
mesh = weft.Mesh(group, y=-1)
plate = np.zeros((ROWS, COLUMNS))
plate[np.arange(ROWS) % 20 < 10, :32] = 1.0

halo = weft.Halo(weft.Layout(mesh, plate.shape, y=weft.shard(0)), {0: 1}, edges="periodic")
cells = np.zeros(halo.shape)
cells[halo.inner] = plate[halo.part]
new = cells.copy()
last = halo.shape[0] - 1  # the row of ghost cells after this rank's own rows
for _ in range(STEPS):
    ghosts = halo.exchange(cells)
    step(cells, new, (2, last - 1))
    ghosts.wait()
    step(cells, new, (1, 2))
    step(cells, new, (last - 1, last))
    cells, new = new, cells

# Computes the same steps on one rank, to compare.
whole = np.pad(plate, ((1, 1), (0, 0)))
following = whole.copy()
for _ in range(STEPS):
    whole[0], whole[-1] = whole[-2], whole[1]
    step(whole, following, (1, ROWS + 1))
    whole, following = following, whole

mine = cells[halo.inner]
different = group.all_reduce(int((mine != whole[1:-1][halo.part]).sum())).wait()
heat = group.all_reduce(float(mine.sum())).wait()
if group.rank == 0:
    print(f"{STEPS} steps: heat {heat:.4f}, {different} cells differ from one rank's")
