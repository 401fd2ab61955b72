! Every rank contributes its number plus one; all ranks get the sum. The program declares the functions of
! weft/c/*.h that it uses by hand.
!
!   gfortran hello.f90 -o hello_fortran $(pkg-config --libs weft)
!   weft run -n 2 -- ./hello_fortran

module weft
  use, intrinsic :: iso_c_binding
  implicit none
  integer(c_int32_t), parameter :: weft_f32 = 1, weft_cpu = 0

  type, bind(c) :: weft_buffer
    type(c_ptr) :: data
    integer(c_int64_t) :: count
    integer(c_int32_t) :: dtype, device
  end type

  type, bind(c) :: weft_error
    integer(c_int32_t) :: struct_size, code = 0, op = 0, rank_count = 0
    integer(c_int64_t) :: call = -1
    integer(c_int32_t) :: ranks(16) = -1
    logical(c_bool) :: quiesced = .true._c_bool
    character(kind=c_char) :: text(1024) = c_null_char
  end type

  interface
    integer(c_int32_t) function weft_context_create(options, context, error) bind(c)
      import
      type(c_ptr), value :: options
      type(c_ptr) :: context
      type(weft_error) :: error
    end function
    subroutine weft_context_destroy(context) bind(c)
      import
      type(c_ptr), value :: context
    end subroutine
    integer(c_int32_t) function weft_group_from_env(context, options, group, error) bind(c)
      import
      type(c_ptr), value :: context, options
      type(c_ptr) :: group
      type(weft_error) :: error
    end function
    subroutine weft_group_destroy(group) bind(c)
      import
      type(c_ptr), value :: group
    end subroutine
    integer(c_int32_t) function weft_group_rank(group, rank, error) bind(c)
      import
      type(c_ptr), value :: group
      integer(c_int32_t) :: rank
      type(weft_error) :: error
    end function
    integer(c_int32_t) function weft_group_size(group, size, error) bind(c)
      import
      type(c_ptr), value :: group
      integer(c_int32_t) :: size
      type(weft_error) :: error
    end function
    integer(c_int32_t) function weft_all_reduce(group, in, out, options, work, error) bind(c)
      import
      type(c_ptr), value :: group, options, work  ! work: c_null_ptr, it waits
      type(weft_buffer) :: in, out
      type(weft_error) :: error
    end function
  end interface
end module

program hello
  use, intrinsic :: iso_fortran_env, only: error_unit
  use weft
  implicit none
  type(weft_error) :: error
  type(weft_buffer) :: all
  type(c_ptr) :: context, group
  integer(c_int32_t) :: rank, size
  real(c_float), target :: x(1000)

  error%struct_size = int(c_sizeof(error), c_int32_t)
  call check(weft_context_create(c_null_ptr, context, error))
  call check(weft_group_from_env(context, c_null_ptr, group, error))
  call check(weft_group_rank(group, rank, error))
  call check(weft_group_size(group, size, error))
  x = real(rank + 1, c_float)
  all = weft_buffer(c_loc(x), 1000, weft_f32, weft_cpu)
  call check(weft_all_reduce(group, all, all, c_null_ptr, c_null_ptr, error))
  print '(a, i0, a, i0, a, i0)', 'rank ', rank, ' of ', size, ': sum ', int(x(1))
  call weft_group_destroy(group)
  call weft_context_destroy(context)

contains
  ! Ends the program with the error's text if a call failed.
  subroutine check(status)
    integer(c_int32_t), intent(in) :: status
    integer :: i
    if (status == 0) return
    i = 1
    do while (error%text(i) /= c_null_char)
      i = i + 1
    end do
    write (error_unit, '(1024a)') error%text(1:i - 1)
    stop 1
  end subroutine
end program
