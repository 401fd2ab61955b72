/* The calls of the package weft that programs make most often, compiled: begin a call on arrays, and wait for
 * it.
 *
 * One module for every CPython from 3.11 on (limited API). It is not linked to libweft: setup() gives it the
 * functions of the library that the package has loaded. It leaves other arrays to the package's own way over
 * ctypes, without an effect: an array of another type, one that is strided, read-only or of a dtype that has
 * no C name. So each error of an argument has one text, that of python/weft/arrays.py. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "weft/weft.h"

/* ---- what is set at run time; the GIL guards it ---- */

static struct {
  weft_status (*submit)(weft_group*, const weft_call*, weft_work**, weft_error*);
  weft_status (*wait_for)(weft_work*, int64_t, bool*, weft_error*);
  void (*destroy)(weft_work*);
  PyObject* failed; /* failed(address of the weft_error) keeps it for errors.last() */
} library;

/* DLPack's table of C functions that a type of arrays has as __dlpack_c_exchange_api__ (from DLPack 1.3 on),
 * and the tensor that they fill in. Declared here up to what is used. */
typedef struct {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
} tensor_view;
typedef struct {
  uint32_t major, minor;
  const void* previous;
  void (*allocate)(void);
  void (*managed_from_object)(void);
  void (*managed_to_object)(void);
  int (*view_of_object)(void* object, tensor_view* view); /* owns nothing; -1 with an exception set */
} exchange_api;

enum { most_types = 8 };
static struct {
  PyObject* type;          /* exactly this one: a derived type may mean something else by its elements */
  const exchange_api* api; /* NULL: by the buffer protocol */
} types[most_types];
static int type_count;
static PyObject *is_neg, *handle_name; /* "is_neg", "_handle" */

/* ---- arrays as buffers: true, or false without an exception ---- */

static bool integer_dtype(bool is_signed, Py_ssize_t bytes, weft_dtype* dtype) {
  switch (bytes) {
    case 1: *dtype = is_signed ? WEFT_I8 : WEFT_U8; return true;
    case 2: *dtype = is_signed ? WEFT_I16 : WEFT_U16; return true;
    case 4: *dtype = is_signed ? WEFT_I32 : WEFT_U32; return true;
    case 8: *dtype = is_signed ? WEFT_I64 : WEFT_U64; return true;
    default: return false;
  }
}

/* The formats of the module struct, and of NumPy for complex numbers. */
static bool dtype_of_format(const char* format, Py_ssize_t bytes, weft_dtype* dtype) {
  if (format == NULL) return false;
  if (strcmp(format, "Zf") == 0) return *dtype = WEFT_C64, true;
  if (strcmp(format, "Zd") == 0) return *dtype = WEFT_C128, true;
  if (format[0] == '\0' || format[1] != '\0') return false;
  switch (format[0]) {
    case 'd': *dtype = WEFT_F64; return true;
    case 'f': *dtype = WEFT_F32; return true;
    case 'e': *dtype = WEFT_F16; return true;
    case '?': *dtype = WEFT_BOOL; return true;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q': return integer_dtype(true, bytes, dtype);
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q': return integer_dtype(false, bytes, dtype);
    default: return false;
  }
}

static bool read_by_protocol(PyObject* object, bool writes, weft_buffer* buffer) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writes ? PyBUF_WRITABLE : 0)) !=
      0) {
    PyErr_Clear();
    return false;
  }
  const bool known = view.itemsize > 0 && dtype_of_format(view.format, view.itemsize, &buffer->dtype);
  if (known) {
    buffer->data = view.buf;
    buffer->count = view.len / view.itemsize;
    buffer->device = WEFT_CPU;
  }
  PyBuffer_Release(&view); /* the object itself is kept by its Work */
  return known;
}

/* The codes of DLDataTypeCode. Complex numbers are left out: they may be conjugate views. */
static bool dtype_of_code(const tensor_view* view, weft_dtype* dtype) {
  if (view->lanes != 1) return false;
  switch (view->code) {
    case 0: return integer_dtype(true, view->bits / 8, dtype);
    case 1: return integer_dtype(false, view->bits / 8, dtype);
    case 2:
      *dtype = view->bits == 64 ? WEFT_F64 : view->bits == 32 ? WEFT_F32 : WEFT_F16;
      return view->bits == 64 || view->bits == 32 || view->bits == 16;
    case 4: *dtype = WEFT_BF16; return view->bits == 16;
    case 6: *dtype = WEFT_BOOL; return view->bits == 8;
    case 10: *dtype = WEFT_F8E4M3; return true;
    case 12: *dtype = WEFT_F8E5M2; return true;
    default: return false;
  }
}

static bool read_by_exchange(PyObject* object, const exchange_api* api, weft_buffer* buffer) {
  tensor_view view;
  if (api->view_of_object(object, &view) != 0) {
    PyErr_Clear();
    return false;
  }
  if (view.device_type != 1 || !dtype_of_code(&view, &buffer->dtype)) return false;
  int64_t count = 1;
  bool in_a_row = true;
  for (int32_t dim = view.ndim - 1; dim >= 0; --dim) {
    if (view.shape[dim] != 1 && view.strides[dim] != count) in_a_row = false;
    count *= view.shape[dim];
  }
  if (!in_a_row && count != 0) return false;
  /* A view whose elements count negated. */
  PyObject* const negative = PyObject_CallMethodObjArgs(object, is_neg, NULL);
  if (negative == NULL) PyErr_Clear();
  Py_XDECREF(negative);
  if (negative != Py_False) return false;
  buffer->data = (char*)view.data + view.byte_offset;
  buffer->count = count;
  buffer->device = WEFT_CPU;
  return true;
}

static bool read_array(PyObject* object, bool writes, weft_buffer* buffer) {
  const PyObject* const type = (PyObject*)Py_TYPE(object);
  for (int i = 0; i < type_count; ++i)
    if (types[i].type == type)
      return types[i].api ? read_by_exchange(object, types[i].api, buffer)
                          : read_by_protocol(object, writes, buffer);
  return false;
}

/* ---- the functions of the module ---- */

static bool arguments(const char* name, Py_ssize_t given, Py_ssize_t expected) {
  if (given == expected) return true;
  PyErr_Format(PyExc_TypeError, "%s got %zd arguments; expected %zd", name, given, expected);
  return false;
}

/* The address that an int holds; 0 of None and of NULL. */
static void* address(PyObject* number) {
  void* const p = number == Py_None ? NULL : PyLong_AsVoidPtr(number);
  if (p == NULL) PyErr_Clear();
  return p;
}

static bool keep(const weft_error* error) {
  PyObject* const number = PyLong_FromVoidPtr((void*)error);
  PyObject* const none = number ? PyObject_CallFunctionObjArgs(library.failed, number, NULL) : NULL;
  Py_XDECREF(number);
  Py_XDECREF(none);
  return none != NULL;
}

PyDoc_STRVAR(
    begin_doc,
    "begin(group, op, in, out, options, root, peer, work): True: a call has begun, and work._handle is "
    "the address of its weft_work; False: it was\n"
    "refused, and errors.last() says why; None: nothing was done, because an argument is none that "
    "this module reads. group, options:\n"
    "addresses, options 0 for the defaults; in, out: arrays, or None where the call has none. The Work "
    "has the address before Python\n"
    "can look for signals, whose handler may raise: so no call is without an owner.");

static PyObject* begin(PyObject* module, PyObject* const* given, Py_ssize_t count) {
  (void)module;
  if (!arguments("begin", count, 8)) return NULL;
  weft_group* const group = address(given[0]);
  PyObject *const in = given[2], *const out = given[3];
  weft_call call = WEFT_CALL_INIT;
  if (group == NULL) Py_RETURN_NONE;
  if (in != Py_None && !read_array(in, in == out, &call.in)) Py_RETURN_NONE;
  if (out == in)
    call.out = call.in;
  else if (out != Py_None && !read_array(out, true, &call.out))
    Py_RETURN_NONE;
  long numbers[3];
  const int places[3] = {1, 5, 6};
  for (int i = 0; i < 3; ++i) {
    numbers[i] = PyLong_AsLong(given[places[i]]);
    if ((numbers[i] == -1 && PyErr_Occurred()) || numbers[i] < INT32_MIN || numbers[i] > INT32_MAX) {
      PyErr_Clear();
      Py_RETURN_NONE;
    }
  }
  call.op = (weft_op)numbers[0];
  call.root = (int32_t)numbers[1];
  call.peer = (int32_t)numbers[2];
  call.options = address(given[4]);
  weft_work* work = NULL;
  weft_error error = WEFT_ERROR_INIT;
  weft_status status;
  Py_BEGIN_ALLOW_THREADS status = library.submit(group, &call, &work, &error);
  Py_END_ALLOW_THREADS if (status != WEFT_OK) {
    if (!keep(&error)) return NULL;
    Py_RETURN_FALSE;
  }
  PyObject* const handle = PyLong_FromVoidPtr(work);
  const bool given_away = handle != NULL && PyObject_SetAttr(given[7], handle_name, handle) == 0;
  Py_XDECREF(handle);
  if (!given_away) {
    library.destroy(work);
    return NULL;
  }
  Py_RETURN_TRUE;
}

PyDoc_STRVAR(wait_doc,
             "wait(work, destroys): waits until the call of work._handle has ended. True: well, and where "
             "`destroys` says so the weft_work is\n"
             "gone, and work._handle is None; False: it has failed, and errors.last() says why. On the main "
             "thread a signal's handler may raise\n"
             "(Ctrl-C): the call is then as it was, and may be waited for again.");

enum { slice_ns = 50 * 1000 * 1000 }; /* how long a wait lasts before Python looks for signals */

static PyObject* wait_for_work(PyObject* module, PyObject* const* given, Py_ssize_t count) {
  (void)module;
  if (!arguments("wait", count, 2)) return NULL;
  PyObject* const handle = PyObject_GetAttr(given[0], handle_name);
  if (handle == NULL) return NULL;
  weft_work* const work = PyLong_AsVoidPtr(handle);
  Py_DECREF(handle);
  if (work == NULL)
    return PyErr_Occurred() ? NULL : (PyErr_SetString(PyExc_ValueError, "work is NULL"), NULL);
  for (;;) {
    bool done = false;
    weft_error error = WEFT_ERROR_INIT;
    weft_status status;
    Py_BEGIN_ALLOW_THREADS status = library.wait_for(work, slice_ns, &done, &error);
    Py_END_ALLOW_THREADS if (status != WEFT_OK) {
      if (!keep(&error)) return NULL;
      Py_RETURN_FALSE;
    }
    if (done) {
      if (given[1] == Py_True) {
        if (PyObject_SetAttr(given[0], handle_name, Py_None) != 0) return NULL;
        library.destroy(work);
      }
      Py_RETURN_TRUE;
    }
    if (PyErr_CheckSignals() != 0) return NULL;
  }
}

PyDoc_STRVAR(add_type_doc,
             "add_type(type, capsule): arrays of exactly this type are read from now on: by DLPack's table "
             "of C functions, its capsule, or where that\n"
             "is None by the buffer protocol. Whether there is room for it, and the table is one that this "
             "module knows.");

static PyObject* add_type(PyObject* module, PyObject* const* given, Py_ssize_t count) {
  (void)module;
  if (!arguments("add_type", count, 2)) return NULL;
  const exchange_api* api = NULL;
  if (given[1] != Py_None) {
    api = PyCapsule_GetPointer(given[1], "dlpack_exchange_api");
    if (api == NULL) return NULL;
    if (api->major != 1 || api->view_of_object == NULL) Py_RETURN_FALSE;
  }
  if (type_count == most_types) Py_RETURN_FALSE;
  Py_INCREF(given[0]);
  types[type_count].type = given[0];
  types[type_count++].api = api;
  Py_RETURN_TRUE;
}

PyDoc_STRVAR(setup_doc,
             "setup(submit, wait_for, destroy, failed): the addresses of the library's functions, and what "
             "keeps an error.");

static PyObject* setup(PyObject* module, PyObject* const* given, Py_ssize_t count) {
  (void)module;
  if (!arguments("setup", count, 4)) return NULL;
  void* functions[3];
  for (int i = 0; i < 3; ++i) {
    functions[i] = PyLong_AsVoidPtr(given[i]);
    if (functions[i] == NULL)
      return PyErr_Occurred() ? NULL : (PyErr_SetString(PyExc_ValueError, "a function is NULL"), NULL);
  }
  memcpy(&library.submit, &functions[0],
         sizeof(void*)); /* C has no cast from an object's address to a function's */
  memcpy(&library.wait_for, &functions[1], sizeof(void*));
  memcpy(&library.destroy, &functions[2], sizeof(void*));
  Py_INCREF(given[3]);
  Py_XDECREF(library.failed);
  library.failed = given[3];
  Py_RETURN_NONE;
}

#define WEFT_FUNCTION(name, function, doc) \
  { name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, doc }

static PyMethodDef methods[] = {
    WEFT_FUNCTION("begin", begin, begin_doc),
    WEFT_FUNCTION("wait", wait_for_work, wait_doc),
    WEFT_FUNCTION("add_type", add_type, add_type_doc),
    WEFT_FUNCTION("setup", setup, setup_doc),
    {NULL, NULL, 0, NULL},
};

/* Initialised in one phase, so that an interpreter which shares nothing with others (a sub-interpreter)
 * refuses it. */
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "weft_fast",
                                        "The most frequent calls of the package weft, compiled.",
                                        -1,
                                        methods,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL};

PyMODINIT_FUNC PyInit_weft_fast(void) {
  if (is_neg == NULL && (is_neg = PyUnicode_InternFromString("is_neg")) == NULL) return NULL;
  if (handle_name == NULL && (handle_name = PyUnicode_InternFromString("_handle")) == NULL) return NULL;
  return PyModule_Create(&definition);
}
