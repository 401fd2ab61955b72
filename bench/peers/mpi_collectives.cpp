// The MPI peers of collectives_bench and p2p_bench: raw MPI calls on ordinary buffers, with the flags,
// checks, samples and rows of those programs. This source is built against each MPI. `weft bench` runs the
// programs; to run one by hand:
//
//   mpirun -n 2 mpi_collectives_openmpi --op all_reduce --rows
#include <mpi.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cases.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

// MPI has no bf16 type: this program uses pairs of bytes, and its own operation, which the compiler
// vectorises.
void add_bf16(void* in, void* inout, int* count, MPI_Datatype*) {
  const auto* const a = static_cast<const bf16*>(in);
  auto* const b = static_cast<bf16*>(inout);
  for (int i = 0; i < *count; ++i) b[i] = bf16(static_cast<float>(a[i]) + static_cast<float>(b[i]));
}

struct Types {
  std::map<DType, MPI_Datatype> of = {
      {DType::f64, MPI_DOUBLE},   {DType::f32, MPI_FLOAT},   {DType::bf16, MPI_UINT16_T},
      {DType::i8, MPI_INT8_T},    {DType::i16, MPI_INT16_T}, {DType::i32, MPI_INT32_T},
      {DType::i64, MPI_INT64_T},  {DType::u8, MPI_UINT8_T},  {DType::u16, MPI_UINT16_T},
      {DType::u32, MPI_UINT32_T}, {DType::u64, MPI_UINT64_T}};
  MPI_Op sum_bf16;
  Types() { MPI_Op_create(add_bf16, 1, &sum_bf16); }
  MPI_Op sum(DType t) const { return t == DType::bf16 ? sum_bf16 : MPI_SUM; }
};

std::string obstacle(const Case& c, const Types& types) {
  if (types.of.count(c.dtype) == 0) return "MPI has no " + std::string(name(c.dtype));
  if (std::max(c.in_count(), c.out_count()) > INT_MAX) return "MPI counts in int";
  if (c.kind == Kind::reduce_scatter && c.in_place) return "in place MPI puts every rank's result first";
  return "";
}

// A ring of ranks, as a communicator with neighbours. In a ring of two ranks both neighbours are the same
// rank, and MPI implementations differ in the places of its two blocks. `straight` is true if the first block
// sent arrives in the first place.
struct Ring {
  MPI_Comm comm = MPI_COMM_NULL;
  bool straight = false;
};
const Ring& ring_of(int ranks) {
  static Ring ring;
  if (ring.comm == MPI_COMM_NULL) {
    const int periodic = 1;
    MPI_Cart_create(MPI_COMM_WORLD, 1, &ranks, &periodic, 0, &ring.comm);
    const int sent[2] = {1, 2};
    int came[2] = {0, 0};
    MPI_Neighbor_alltoall(sent, 1, MPI_INT, came, 1, MPI_INT, ring.comm);
    ring.straight = came[0] == 1;
  }
  return ring;
}

// The two faces of each field: a type for one face, and the offsets of the first and the second face in
// bytes.
struct Faces {
  MPI_Datatype type;
  std::vector<std::pair<MPI_Aint, MPI_Aint>> at;
};
Faces faces_of(const Case& c, MPI_Datatype element) {
  Faces f{};
  const auto [fields, runs, run] = c.faces();
  const auto size = static_cast<MPI_Aint>(size_bytes(c.dtype));
  if (runs > 1)
    MPI_Type_vector(static_cast<int>(runs), static_cast<int>(run), static_cast<int>(2 * run), element,
                    &f.type);
  else
    MPI_Type_contiguous(static_cast<int>(run), element, &f.type);
  for (std::int64_t i = 0; i < fields; ++i) {
    const MPI_Aint at = 2 * i * runs * run * size;
    f.at.emplace_back(at, at + run * size);
  }
  MPI_Type_commit(&f.type);
  return f;
}

// The exchange as a program writes it by hand: a receive and a send for each face.
std::function<void(std::byte*, std::byte*)> halo_by_hand(const Case& c, int rank, const Faces& f) {
  const int before = (rank + c.ranks - 1) % c.ranks, after = (rank + 1) % c.ranks;
  return [=](std::byte* in, std::byte* out) {
    MPI_Request requests[4 * kHaloFields];
    int n = 0;
    for (std::size_t i = 0; i < f.at.size(); ++i) {
      const int tag = 2 * static_cast<int>(i);
      MPI_Irecv(out + f.at[i].first, 1, f.type, before, tag, MPI_COMM_WORLD, &requests[n++]);
      MPI_Irecv(out + f.at[i].second, 1, f.type, after, tag + 1, MPI_COMM_WORLD, &requests[n++]);
      MPI_Isend(in + f.at[i].second, 1, f.type, after, tag, MPI_COMM_WORLD, &requests[n++]);
      MPI_Isend(in + f.at[i].first, 1, f.type, before, tag + 1, MPI_COMM_WORLD, &requests[n++]);
    }
    MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
  };
}

// The exchange as one call, with one type for the faces of all fields on a side.
std::function<void(std::byte*, std::byte*)> halo_of_neighbours(const Case& c, const Faces& f) {
  MPI_Datatype sides[2];
  for (int side = 0; side < 2; ++side) {
    std::vector<MPI_Aint> at;
    for (const auto& face : f.at) at.push_back(side == 0 ? face.first : face.second);
    const std::vector<int> ones(at.size(), 1);
    MPI_Type_create_hindexed(static_cast<int>(at.size()), ones.data(), at.data(), f.type, &sides[side]);
    MPI_Type_commit(&sides[side]);
  }
  const Ring& ring = ring_of(c.ranks);
  return [comm = ring.comm, straight = ring.straight, low = sides[0], high = sides[1]](std::byte* in,
                                                                                       std::byte* out) {
    const int counts[2] = {1, 1};
    const MPI_Aint none[2] = {0, 0};
    const MPI_Datatype from[2] = {low, high}, swapped[2] = {high, low};
    MPI_Neighbor_alltoallw(in, counts, none, from, out, counts, none, straight ? swapped : from, comm);
  };
}

std::function<void(std::byte*, std::byte*)> call_of(const Case& c, int rank, const Types& types) {
  const MPI_Datatype type = types.of.at(c.dtype);
  const MPI_Op sum = types.sum(c.dtype);
  const MPI_Comm world = MPI_COMM_WORLD;
  const int block = static_cast<int>(c.block());
  const bool in_place = c.in_place;
  const std::int64_t before = rank * c.block() * size_bytes(c.dtype);  // bytes of the lower ranks' blocks
  switch (c.kind) {
    case Kind::all_reduce:
      return [=](std::byte* in, std::byte* out) {
        MPI_Allreduce(in_place ? MPI_IN_PLACE : in, out, block, type, sum, world);
      };
    case Kind::reduce:
      return [=](std::byte* in, std::byte* out) {
        MPI_Reduce(in_place && rank == 0 ? MPI_IN_PLACE : in, out, block, type, sum, 0, world);
      };
    case Kind::broadcast:
      return [=](std::byte* in, std::byte* out) { MPI_Bcast(rank == 0 ? in : out, block, type, 0, world); };
    case Kind::all_gather:
      return [=](std::byte* in, std::byte* out) {
        if (in_place) {
          MPI_Allgather(MPI_IN_PLACE, 0, type, in - before, block, type, world);
        } else {
          MPI_Allgather(in, block, type, out, block, type, world);
        }
      };
    case Kind::reduce_scatter:
      return
          [=](std::byte* in, std::byte* out) { MPI_Reduce_scatter_block(in, out, block, type, sum, world); };
    case Kind::all_to_all:
      return [=](std::byte* in, std::byte* out) { MPI_Alltoall(in, block, type, out, block, type, world); };
    case Kind::halo_rows:
    case Kind::halo_columns:
    case Kind::halo_four_columns:
    case Kind::halo_3d:
    case Kind::halo_fields:
    case Kind::halo_3d_fields: return halo_by_hand(c, rank, faces_of(c, type));
    case Kind::ping_pong:
      return [=](std::byte* in, std::byte* out) {
        if (rank == 0) {
          MPI_Send(in, block, type, 1, 0, world);
          MPI_Recv(out, block, type, 1, 0, world, MPI_STATUS_IGNORE);
        } else if (rank == 1) {
          MPI_Recv(out, block, type, 0, 0, world, MPI_STATUS_IGNORE);
          MPI_Send(in, block, type, 0, 0, world);
        }
      };
    case Kind::one_way:
      return [=](std::byte* in, std::byte* out) {
        MPI_Request requests[kWindow];
        int done = 0;
        if (rank == 0) {
          for (MPI_Request& r : requests) MPI_Isend(in, block, type, 1, 0, world, &r);
          MPI_Waitall(kWindow, requests, MPI_STATUSES_IGNORE);
          MPI_Recv(&done, 1, MPI_INT, 1, 1, world, MPI_STATUS_IGNORE);
        } else if (rank == 1) {
          for (MPI_Request& r : requests) MPI_Irecv(out, block, type, 0, 0, world, &r);
          MPI_Waitall(kWindow, requests, MPI_STATUSES_IGNORE);
          MPI_Send(&done, 1, MPI_INT, 0, 1, world);
        }
      };
    case Kind::coalesced: break;  // weft's alone: it compares two forms of its own
  }
  return {};
}

std::string library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string line(text, static_cast<std::size_t>(length));
  line = line.substr(0, line.find_first_of(",\n"));
  std::replace(line.begin(), line.end(), '\t', ' ');
  return line;
}

void body(int argc, char** argv) {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  Spec spec =
      parse_spec(argc, argv,
                 {{Kind::all_reduce, Kind::reduce, Kind::broadcast, Kind::all_gather, Kind::reduce_scatter,
                   Kind::all_to_all, Kind::ping_pong, Kind::one_way, Kind::halo_rows, Kind::halo_columns,
                   Kind::halo_four_columns, Kind::halo_3d, Kind::halo_fields, Kind::halo_3d_fields}});
  spec.ranks = size;
  const Agree agree = [](std::int64_t mine) {
    MPI_Bcast(&mine, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);
    return mine;
  };
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) spec.print_settings(WEFT_PEER, library_version());
  const Types types;
  Turns turns(spec.turns);
  for (const Case& c : cases_of(spec)) {
    if (!turns.take()) return;
    Row row = row_of(c, "foreign");
    if (const std::string why = obstacle(c, types); !why.empty()) {
      if (rank == 0) print_unsupported(row, why);
      continue;
    }
    const auto buffers = std::make_shared<Buffers>(c, rank, allocate_pages);
    Times t = measure(prepare(buffers, call_of(c, rank, types)), agree, spec.seconds);
    // Reports the faster of the two forms. Between two ranks MPICH 4.0 does not always put the two blocks
    // from one neighbour in the same places, so for that case only the first form is measured.
    if (is_halo(c.kind) && (size > 2 || std::string_view(WEFT_PEER) != "mpich")) {
      const Times other = measure(prepare(buffers, halo_of_neighbours(c, faces_of(c, types.of.at(c.dtype)))),
                                  agree, spec.seconds);
      if (agree(other.median_us < t.median_us ? 1 : 0) == 1) t = other;
    }
    add_times(row, per_message(t, c.kind), c.moved_bytes(), bus_factor(c.kind, c.ranks));
    if (rank == 0) print(row);
  }
  turns.take();  // no rank leaves before the end
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    weft::bench::body(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
