//! The pointers and the strides in the arguments of kernels.

use std::marker::PhantomData;

use candle_core::DType;

use crate::kernel_struct::{CppType, KernelField, kernel_struct};

/// The numbers that a pointer in a kernel's argument points to.
pub trait Pointee: Copy {
    /// The type in C++.
    const CPP: &'static str;
    /// The dtype of the tensors whose memory it may be; `None` if it is one of several.
    const DTYPE: Option<DType>;
}

/// Numbers of the type for which a program is compiled, or of another one that its macros name: `void` in C++.
#[derive(Debug, Clone, Copy, Default)]
pub struct Elements;

impl Pointee for Elements {
    const CPP: &'static str = "void";
    const DTYPE: Option<DType> = None;
}

impl Pointee for f32 {
    const CPP: &'static str = "float";
    const DTYPE: Option<DType> = Some(DType::F32);
}

impl Pointee for [f32; 2] {
    const CPP: &'static str = "float2";
    const DTYPE: Option<DType> = Some(DType::F32);
}

impl Pointee for i32 {
    const CPP: &'static str = "int";
    const DTYPE: Option<DType> = Some(DType::I32);
}

impl Pointee for [i32; 2] {
    const CPP: &'static str = "int2";
    const DTYPE: Option<DType> = Some(DType::I32);
}

impl Pointee for [i32; 4] {
    const CPP: &'static str = "int4";
    const DTYPE: Option<DType> = Some(DType::I32);
}

impl Pointee for u8 {
    const CPP: &'static str = "u8";
    const DTYPE: Option<DType> = Some(DType::U8);
}

impl Pointee for u32 {
    const CPP: &'static str = "u32";
    const DTYPE: Option<DType> = Some(DType::U32);
}

/// The address on the device of numbers that kernels read; null by default.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct InputPointer<T> {
    address: u64,
    pointee: PhantomData<T>,
}

/// The address on the device of numbers that kernels write; null by default.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct OutputPointer<T> {
    address: u64,
    pointee: PhantomData<T>,
}

impl<T: Pointee> InputPointer<T> {
    /// Returns the pointer with an address.
    pub fn new(address: u64) -> Self {
        Self { address, pointee: PhantomData }
    }

    /// Returns the address.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Returns the address for a field that the kernels of another pass write.
    pub fn into_output(self) -> OutputPointer<T> {
        OutputPointer::new(self.address)
    }
}

impl<T: Pointee> OutputPointer<T> {
    /// Returns the pointer with an address.
    pub fn new(address: u64) -> Self {
        Self { address, pointee: PhantomData }
    }

    /// Returns the address.
    pub fn address(self) -> u64 {
        self.address
    }
}

// SAFETY: devices and their hosts have addresses of 64 bits.
unsafe impl<T: Pointee> KernelField for InputPointer<T> {
    const TYPE: CppType = CppType::Input(T::CPP);
}

// SAFETY: as for `InputPointer`.
unsafe impl<T: Pointee> KernelField for OutputPointer<T> {
    const TYPE: CppType = CppType::Output(T::CPP);
}

// SAFETY: `int` has 32 bits on a GPU and on every host of the emulator.
unsafe impl KernelField for i32 {
    const TYPE: CppType = CppType::Number("int");
}

// SAFETY: `device.cuh` defines the type with 32 bits.
unsafe impl KernelField for u32 {
    const TYPE: CppType = CppType::Number("u32");
}

// SAFETY: `device.cuh` defines the type with 64 bits.
unsafe impl KernelField for i64 {
    const TYPE: CppType = CppType::Number("i64");
}

// SAFETY: both are of IEEE 754.
unsafe impl KernelField for f32 {
    const TYPE: CppType = CppType::Number("float");
}

kernel_struct! {
    /// The strides in elements of a tensor (B, H, T, D) or (B, T, H, D), whose last dimension is contiguous.
    pub struct RowStrides {
        /// From a sequence to the next one.
        pub sequence: i64,
        /// From a head to the next one.
        pub head: i64,
        /// From a token to the next one.
        pub row: i64,
    }
}

kernel_struct! {
    /// The strides in elements of a tensor that is broadcast to the scores (B, H, T_q, T_kv). A broadcast dimension has
    /// the stride 0.
    pub struct ScoreStrides {
        /// From a sequence to the next one.
        pub sequence: i64,
        /// From a head to the next one.
        pub head: i64,
        /// From a query to the next one.
        pub query: i64,
        /// From a key to the next one.
        pub key: i64,
    }
}
