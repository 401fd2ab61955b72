/* Meshes: the ranks of a group as a grid with named axes, and its parts.
 *
 * A mesh is a value behind a handle. Functions do not change it, but make another one. Any thread may call
 * the functions, and several threads may use one mesh at once. Only weft_mesh_group communicates and
 * blocks. A mesh keeps its group: the rank leaves the group when the group's handle, its meshes and their
 * layouts are all destroyed. */
#ifndef WEFT_C_MESH_H
#define WEFT_C_MESH_H

#include "weft/c/group.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A grid of ranks as one of them sees it. Or a sub-mesh: the ranks that share this rank's coordinates on
 * all other axes. */
typedef struct weft_mesh weft_mesh;

/* If a function takes a list of axes, one of the sizes may be -1: it means the number of ranks divided by the
 * other sizes. */
typedef struct weft_mesh_axis {
  const char* name;
  int32_t size;
} weft_mesh_axis;

/* Makes a mesh of all ranks of `group` in row-major order: neighbours along the last axis have
 * neighbouring ranks. weft copies the names. Fails with WEFT_BAD_ARGUMENT if the sizes do not fit the
 * number of ranks. The text shows the calculation. */
weft_status weft_mesh_create(weft_group* group, const weft_mesh_axis* axes, int32_t axis_count,
                             weft_mesh** mesh, weft_error* error);
/* Makes a mesh that cannot communicate, as `rank` sees it, for planning in one process. Layouts and their
 * shapes work. Functions that need a group fail with WEFT_UNSUPPORTED. No size may be -1. */
weft_status weft_mesh_create_arithmetic(weft_context* context, const weft_mesh_axis* axes, int32_t axis_count,
                                        int32_t rank, weft_mesh** mesh, weft_error* error);
/* Destroys the handle. Sub-meshes and layouts of the mesh stay valid. */
void weft_mesh_destroy(weft_mesh* mesh);

/* Gives this rank's sub-mesh along some axes, in the given order. If weft_mesh_unflatten divided an axis,
 * its old name means its parts together. */
weft_status weft_mesh_along(const weft_mesh* mesh, const char* const* axes, int32_t axis_count,
                            weft_mesh** along, weft_error* error);
/* Makes a mesh in which all axes of `mesh` are joined to one axis called `name`, with the ranks in row-major
 * order. */
weft_status weft_mesh_flatten(const weft_mesh* mesh, const char* name, weft_mesh** flat, weft_error* error);
/* Makes another root mesh of the same ranks, in which one axis is divided into several. It has layouts of its
 * own. */
weft_status weft_mesh_unflatten(const weft_mesh* mesh, const char* axis, const weft_mesh_axis* parts,
                                int32_t part_count, weft_mesh** divided, weft_error* error);
/* Gives the root mesh, from which this mesh was cut. A mesh that was not cut from another mesh is its own
 * root. */
weft_status weft_mesh_root(const weft_mesh* mesh, weft_mesh** root, weft_error* error);
/* Sets *equal to whether both handles mean the same axes of the same root mesh. */
weft_status weft_mesh_equal(const weft_mesh* a, const weft_mesh* b, bool* equal, weft_error* error);

/* The number of ranks of this mesh, and the number of this rank among them. */
weft_status weft_mesh_size(const weft_mesh* mesh, int32_t* size, weft_error* error);
weft_status weft_mesh_rank(const weft_mesh* mesh, int32_t* rank, weft_error* error);
weft_status weft_mesh_axis_count(const weft_mesh* mesh, int32_t* count, weft_error* error);
/* Gives axis `index`. Its name is valid as long as this handle. */
weft_status weft_mesh_get_axis(const weft_mesh* mesh, int32_t index, weft_mesh_axis* axis, weft_error* error);
/* The index of the axis called `axis`. -1 if there is none. */
weft_status weft_mesh_find_axis(const weft_mesh* mesh, const char* axis, int32_t* index, weft_error* error);
/* This rank's coordinate on an axis. */
weft_status weft_mesh_coordinate(const weft_mesh* mesh, const char* axis, int32_t* coordinate,
                                 weft_error* error);
/* Convert a rank of this mesh to its coordinates, one for each axis, and back. */
weft_status weft_mesh_coordinates(const weft_mesh* mesh, int32_t rank, int32_t* coordinates,
                                  int32_t axis_count, weft_error* error);
weft_status weft_mesh_rank_at(const weft_mesh* mesh, const int32_t* coordinates, int32_t axis_count,
                              int32_t* rank, weft_error* error);
/* The ranks of this mesh, in their order in this mesh, as the root mesh numbers them: ranks[0] to ranks[size
 * - 1]. `room`: the size of `ranks`, at least the size of the mesh. */
weft_status weft_mesh_ranks(const weft_mesh* mesh, int32_t* ranks, int32_t room, weft_error* error);

/* The group of this mesh's ranks, numbered as weft_mesh_rank numbers them, for any operation. The first
 * call for these axes is collective among these ranks, and blocks at most the deadline of the mesh's
 * group. Later calls give the same group. Destroy the handle like any other. weft also uses this group for
 * its own calls along these axes. */
weft_status weft_mesh_group(const weft_mesh* mesh, weft_group** group, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_MESH_H */
