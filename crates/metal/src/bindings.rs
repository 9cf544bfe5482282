//! The text by which a kernel with one list of buffers reads its arguments from them.
//!
//! The structs of arguments are the structs of the CUDA kernels, with pointers. Candle binds buffers to indices, so
//! that it knows which ones a launch reads and writes. A kernel therefore gets the numbers of its struct as bytes, in
//! which a pointer is null or not, and the pointers as buffers.

use candle_attention_cuda::shared::{CppType, KernelArguments};

use crate::launch::MetalLaunch;

/// A field of some arguments that is bound as a buffer.
pub(crate) struct BoundField<A: 'static> {
    pub name: &'static str,
    /// Returns the address in some arguments.
    pub address: fn(&A) -> u64,
}

/// Lists fields of arguments.
macro_rules! bound_fields {
    ($($field:ident),* $(,)?) => {
        &[$($crate::bindings::BoundField {
            name: stringify!($field),
            address: |arguments| arguments.$field.address(),
        }),*]
    };
}
pub(crate) use bound_fields;

/// A struct of arguments of launches.
pub(crate) trait LaunchArguments: KernelArguments + 'static {
    /// Returns the fields that a kernel is bound to, in the order of their indices, from 1 on: index 0 has the numbers.
    /// Metal has 31 indices.
    fn fields_of(kernel: &str) -> &'static [BoundField<Self>];

    /// Returns the arguments of a launch, from the arguments of the call.
    fn of_launch(&self, launch: &MetalLaunch) -> Self;
}

/// A struct of arguments with one list of buffers.
pub(crate) trait BoundArguments: LaunchArguments {
    /// The beginning of the names of its macros, such as `NORM`; in lower case, of its files.
    const PREFIX: &'static str;
    /// The bound fields.
    const FIELDS: &'static [BoundField<Self>];
}

/// Returns the name of the text among the files of the source.
pub(crate) fn header_name<A: BoundArguments>() -> String {
    format!("{}_buffers.metal", A::PREFIX.to_lowercase())
}

/// Returns the text.
pub(crate) fn header<A: BoundArguments>() -> String {
    let prefix = A::PREFIX;
    let definition = A::DEFINITION;
    let struct_name = definition.name;
    let numbers_name = struct_name.replace("Arguments", "Numbers");
    let is_bound = |name: &str| A::FIELDS.iter().any(|bound| bound.name == name);
    let is_pointer = |cpp_type| matches!(cpp_type, CppType::Input(_) | CppType::Output(_));
    let mut numbers = format!("// The arguments as bytes. A pointer is 0 if it is null.\nstruct {numbers_name} {{\n");
    let mut reads = format!("#define READ_{prefix}_ARGUMENTS(arguments)");
    for field in definition.fields {
        let name = field.name;
        if !is_pointer(field.cpp_type) {
            numbers += &format!("    {} {name};\n", field.cpp_type.name());
            reads += &format!(" \\\n    arguments.{name} = numbers.{name};");
            continue;
        }
        numbers += &format!("    u64 {name};\n");
        reads += &match is_bound(name) {
            true => format!(
                " \\\n    if (numbers.{name}) arguments.{name} = {name}_buffer; else arguments.{name} = nullptr;"
            ),
            false => format!(" \\\n    arguments.{name} = nullptr;"),
        };
    }
    numbers += &format!("}};\nstatic_assert(sizeof({numbers_name}) == sizeof({struct_name}), \"the size in Rust\");\n");
    let mut buffers = format!("#define {prefix}_BUFFERS const CONSTANT {numbers_name}& numbers BUFFER(0)");
    let mut of_arguments = format!("#define {prefix}_BUFFERS_OF(arguments) (const {numbers_name}&)arguments");
    for (index, bound) in A::FIELDS.iter().enumerate() {
        let name = bound.name;
        let field = definition.fields.iter().find(|field| field.name == name);
        let pointer = field.map_or_else(String::new, |field| field.cpp_type.name());
        buffers += &format!(", \\\n    {pointer} {name}_buffer BUFFER({})", index + 1);
        of_arguments += &format!(", \\\n    arguments.{name}");
    }
    let include = format!("{}_arguments.cuh", prefix.to_lowercase());
    format!("#include \"{include}\"\n\n{numbers}\n{buffers}\n\n{of_arguments}\n\n{reads}\n")
}
