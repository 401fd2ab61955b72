# Tests over the MPIs, under their own mpirun. With neither, `backends/mpi_job` remains, and skips by name.
#
# mpirun_test(<test> <target> [RANKS n ...] [TIMEOUT s] [LABELS ...] [ARGS ...]) runs the program in 2 and in
# 4 ranks, or in those given, under each mpirun, as <test>_openmpi_2, …, with WEFT_TEST_BACKEND set. Under
# sanitizers more than two ranks, and Open MPI, are for the tier "full". Sanitizers see only what they
# compiled: of the MPIs, thread's leaves the locks alone, and UCX beneath MPICH must not patch mmap; what Open
# MPI never frees is not ours (weft's own leaks are looked for over MPICH).
set(sanitized_openmpi "")
set(sanitized_mpich "")
if(WEFT_SANITIZE STREQUAL "thread")
  set(tsan "TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1")
  set(sanitized_openmpi "${tsan}")
  set(sanitized_mpich "${tsan};UCX_MEM_EVENTS=no")
elseif(WEFT_SANITIZE)
  set(sanitized_openmpi "ASAN_OPTIONS=detect_stack_use_after_return=1:detect_leaks=0")
endif()
set(mpirun_openmpi mpirun.openmpi --oversubscribe --allow-run-as-root)
set(mpirun_mpich mpirun.mpich)
function(mpirun_test name target)
  cmake_parse_arguments(T "" "TIMEOUT" "LABELS;ARGS;RANKS" ${ARGN})
  if(WEFT_SANITIZE STREQUAL "thread")  # it sees the threads of one process: two ranks show them all
    set(T_RANKS 2)
    list(APPEND T_LABELS full)  # and of MPI's it sees little
  elseif(NOT T_RANKS)
    set(T_RANKS 2 4)
  endif()
  foreach(mpi openmpi mpich)
    if(NOT TARGET weft_backend_mpi-${mpi})
      continue()
    endif()
    if(WEFT_SANITIZE STREQUAL "thread")
      add_dependencies(weft_tests_backends weft_backend_mpi-${mpi})  # for the tier "full" alone
    else()
      add_dependencies(${target} weft_backend_mpi-${mpi})
    endif()
    foreach(ranks ${T_RANKS})
      set(test ${name}_${mpi}_${ranks})
      add_test(NAME ${test} COMMAND ${mpirun_${mpi}} -n ${ranks} $<TARGET_FILE:${target}> ${T_ARGS})
      # Ranks that wait leave the cores to the others; nothing here needs more than this host.
      set(labels backends ${T_LABELS})
      # The code is the same over both, and so are its accesses.
      if(WEFT_SANITIZE AND (ranks GREATER 2 OR mpi STREQUAL "openmpi"))
        list(APPEND labels full)
      endif()
      weft_test_runs(${test} SLOTS ${weft_two_cores} TIMEOUT ${T_TIMEOUT} LABELS ${labels})
      set_tests_properties(${test} PROPERTIES
        ENVIRONMENT "WEFT_TEST_BACKEND=mpi-${mpi};OMPI_MCA_mpi_yield_when_idle=1;OMPI_MCA_rmaps_base_oversubscribe=1;${sanitized_${mpi}}")
    endforeach()
  endforeach()
endfunction()

set(runs BUILD_ONLY)
if(NOT TARGET weft_backend_mpi-openmpi AND NOT TARGET weft_backend_mpi-mpich)
  set(runs)
endif()
weft_test(backends/mpi_job ALONE ${runs})
mpirun_test(backends/mpi_job backends_mpi_job_test TIMEOUT 120)

# Jobs that fail, and programs that use MPI themselves.
weft_test(backends/mpi WAITS TIMEOUT 180 DEFINES WEFT_FAILING_RANKS="$<TARGET_FILE:weft_test_failing_ranks>" NEEDS weft_test_failing_ranks)
weft_test_target(mpi_test backends/mpi)
set_tests_properties(backends/mpi PROPERTIES ENVIRONMENT "${sanitized_openmpi};${sanitized_mpich}")
foreach(mpi openmpi mpich)
  string(TOUPPER ${mpi} upper)
  set(program "")
  if(TARGET weft_backend_mpi-${mpi})
    add_executable(weft_test_mpi_program_${mpi} mpi_program.cpp)
    target_compile_definitions(weft_test_mpi_program_${mpi} PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
    target_link_libraries(weft_test_mpi_program_${mpi} PRIVATE weft weft_flags fmt::fmt PkgConfig::WEFT_MPI_${mpi})
    add_dependencies(${mpi_test} weft_test_mpi_program_${mpi} weft_backend_mpi-${mpi})
    set(program "$<TARGET_FILE:weft_test_mpi_program_${mpi}>")
  endif()
  target_compile_definitions(${mpi_test} PRIVATE WEFT_MPI_PROGRAM_${upper}="${program}")
endforeach()

# The one conformance suite, each process a rank.
mpirun_test(backends/conformance backends_conformance_test TIMEOUT 300 LABELS conformance ARGS --gtest_filter=Job/*)
# Its canonical sums have one hash for every backend; 2 and 4 ranks are above.
if(NOT WEFT_SANITIZE STREQUAL "thread")
  mpirun_test(backends/canonical_hash backends_conformance_test RANKS 3 5 6 7 8 TIMEOUT 120 LABELS conformance
              ARGS --gtest_filter=Job/OneHash.*)
endif()

mpirun_test(backends/any_source backends_any_source_test RANKS 3 TIMEOUT 120 ARGS --gtest_filter=Each/*)
mpirun_test(backends/exchange backends_exchange_test RANKS 3 TIMEOUT 120 ARGS --gtest_filter=Each/*)
mpirun_test(backends/min_loc backends_min_loc_test RANKS 4 TIMEOUT 120 ARGS --gtest_filter=Each/*)

# The cases as data.
mpirun_test(backends/cases backends_cases_test RANKS 4 TIMEOUT 120 ARGS --gtest_filter=Each/*)
