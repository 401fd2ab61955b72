//! Every rank contributes its number plus one; all ranks get the sum. The program declares the functions of
//! weft/c/*.h that it uses by hand.
//!
//!   rustc hello.rs -o hello_rust -C link-args="$(pkg-config --libs weft)"
//!   weft run -n 2 -- ./hello_rust

use std::os::raw::{c_char, c_void};
use std::ptr::{null, null_mut};

#[repr(C)]
struct Buffer { data: *mut c_void, count: i64, dtype: i32, device: i32 }
const F32: i32 = 1;
const CPU: i32 = 0;

#[repr(C)]
struct Error { struct_size: u32, code: i32, op: i32, rank_count: i32, call: u64, ranks: [i32; 16], quiesced: bool, text: [c_char; 1024] }

extern "C" {
    fn weft_context_create(options: *const c_void, context: *mut *mut c_void, error: *mut Error) -> i32;
    fn weft_context_destroy(context: *mut c_void);
    fn weft_group_from_env(context: *mut c_void, options: *const c_void, group: *mut *mut c_void, error: *mut Error) -> i32;
    fn weft_group_destroy(group: *mut c_void);
    fn weft_group_rank(group: *const c_void, rank: *mut i32, error: *mut Error) -> i32;
    fn weft_group_size(group: *const c_void, size: *mut i32, error: *mut Error) -> i32;
    fn weft_all_reduce(group: *mut c_void, input: *const Buffer, output: *const Buffer, options: *const c_void,
                       work: *mut *mut c_void, error: *mut Error) -> i32;
}

/// Ends the program with the error's text if a call failed.
fn check(status: i32, error: &Error) {
    if status != 0 {
        let text = unsafe { std::ffi::CStr::from_ptr(error.text.as_ptr()) };
        eprintln!("{}", text.to_string_lossy());
        std::process::exit(1);
    }
}

fn main() {
    let (mut context, mut group, mut rank, mut size) = (null_mut(), null_mut(), 0, 0);
    unsafe {
        let mut error: Error = std::mem::zeroed();
        error.struct_size = std::mem::size_of::<Error>() as u32;
        check(weft_context_create(null(), &mut context, &mut error), &error);
        check(weft_group_from_env(context, null(), &mut group, &mut error), &error);
        check(weft_group_rank(group, &mut rank, &mut error), &error);
        check(weft_group_size(group, &mut size, &mut error), &error);
        let mut x = [(rank + 1) as f32; 1000];
        let all = Buffer { data: x.as_mut_ptr() as *mut c_void, count: 1000, dtype: F32, device: CPU };
        check(weft_all_reduce(group, &all, &all, null(), null_mut(), &mut error), &error);
        println!("rank {} of {}: sum {}", rank, size, x[0]);
        weft_group_destroy(group);
        weft_context_destroy(context);
    }
}
