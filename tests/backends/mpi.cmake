# Tests over the MPIs, under their own mpirun. Absent libraries: `backends/mpi_job` remains, and skips by name.
#
# mpirun_test(<test> <target> [PROCESSORS n] [TIMEOUT s] [LABELS ...] [ARGS ...]) runs the program in 2 and in 4 ranks under each
# mpirun, as <test>_openmpi_2, …, with WEFT_TEST_BACKEND set.
set(mpirun_openmpi mpirun.openmpi --oversubscribe --allow-run-as-root)
set(mpirun_mpich mpirun.mpich)
function(mpirun_test name target)
  cmake_parse_arguments(T "" "TIMEOUT" "LABELS;ARGS" ${ARGN})
  foreach(mpi openmpi mpich)
    if(NOT TARGET weft_backend_mpi-${mpi})
      continue()
    endif()
    add_dependencies(${target} weft_backend_mpi-${mpi})
    foreach(ranks 2 4)
      set(test ${name}_${mpi}_${ranks})
      add_test(NAME ${test} COMMAND ${mpirun_${mpi}} -n ${ranks} $<TARGET_FILE:${target}> ${T_ARGS})
      # Ranks that wait leave the cores to the others; nothing here needs more than this host.
      set_tests_properties(${test} PROPERTIES PROCESSORS 2 TIMEOUT ${T_TIMEOUT} LABELS "backends;${T_LABELS}"
        ENVIRONMENT "WEFT_TEST_BACKEND=mpi-${mpi};OMPI_MCA_mpi_yield_when_idle=1;OMPI_MCA_rmaps_base_oversubscribe=1")
    endforeach()
  endforeach()
endfunction()

weft_test(backends/mpi_job)
mpirun_test(backends/mpi_job backends_mpi_job_test TIMEOUT 120)
