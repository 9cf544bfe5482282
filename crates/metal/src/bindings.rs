//! The buffers that kernels are bound to, and the text by which a kernel reads its arguments from them.
//!
//! The structs of arguments are the structs of the CUDA kernels, with pointers. Candle binds buffers to indices, so
//! that it knows which ones a launch reads and writes. A kernel therefore gets the numbers of its struct as bytes, in
//! which a pointer is null or not, and pointers as buffers.

use candle_attention_cuda::shared::{CppType, KernelArguments, StructDefinition, StructHeader};

use crate::launch::MetalLaunch;

/// A field of some arguments that is bound as a buffer.
pub(crate) struct BoundField<A: 'static> {
    pub name: &'static str,
    /// Returns the address in some arguments.
    pub address: fn(&A) -> u64,
}

/// The bound fields of some kernels, in the order of their indices, from 1 on: index 0 has the numbers. Metal has 31
/// indices.
pub(crate) struct BufferList<A: 'static> {
    /// The beginning of the names of its macros, such as `NORM`.
    pub name: &'static str,
    pub fields: &'static [BoundField<A>],
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
    /// All lists of buffers.
    const LISTS: &'static [BufferList<Self>];

    /// Returns the fields of the list that a kernel is bound to.
    fn fields_of(kernel: &str) -> &'static [BoundField<Self>];

    /// Returns the arguments of a launch, from the arguments of the call.
    fn of_launch(&self, launch: &MetalLaunch) -> Self;
}

/// Returns the header with the numbers of some arguments and the macros of their lists of buffers.
pub(crate) fn header<A: LaunchArguments>() -> StructHeader {
    let of_arguments = A::DEFINITION.header_name();
    let lists: Vec<String> = A::LISTS.iter().map(BufferList::text).collect();
    let text = format!("#include \"{of_arguments}\"\n\n{}\n{}", numbers(&A::DEFINITION), lists.join("\n"));
    StructHeader { name: of_arguments.replace("arguments.cuh", "buffers.metal"), text }
}

/// Returns the struct of the arguments as bytes.
fn numbers(definition: &StructDefinition) -> String {
    let (of_arguments, of_numbers) = (definition.name, numbers_name(definition));
    let mut text = format!("// The arguments as bytes. A pointer is 0 if it is null.\nstruct {of_numbers} {{\n");
    for field in definition.fields {
        let cpp_type = if is_pointer(field.cpp_type) { "u64".into() } else { field.cpp_type.name() };
        text += &format!("    {cpp_type} {};\n", field.name);
    }
    text + &format!("}};\nstatic_assert(sizeof({of_numbers}) == sizeof({of_arguments}), \"the size in Rust\");\n")
}

/// Returns the name of the struct of the arguments as bytes.
fn numbers_name(definition: &StructDefinition) -> String {
    definition.name.replace("Arguments", "Numbers")
}

/// Returns whether a type is a pointer.
fn is_pointer(cpp_type: CppType) -> bool {
    matches!(cpp_type, CppType::Input(_) | CppType::Output(_))
}

impl<A: LaunchArguments> BufferList<A> {
    /// Returns the macros of a kernel with these buffers: its parameters, the arguments for them on the emulator, and
    /// the statements that read the arguments.
    fn text(&self) -> String {
        let Self { name: list, fields } = self;
        let definition = A::DEFINITION;
        let numbers_name = numbers_name(&definition);
        let mut reads = format!("#define READ_{list}_ARGUMENTS(arguments)");
        for field in definition.fields {
            let name = field.name;
            let is_bound = fields.iter().any(|bound| bound.name == name);
            reads += &match (is_pointer(field.cpp_type), is_bound) {
                (false, _) => format!(" \\\n    arguments.{name} = numbers.{name};"),
                (true, false) => format!(" \\\n    arguments.{name} = nullptr;"),
                (true, true) => format!(
                    " \\\n    if (numbers.{name}) arguments.{name} = {name}_buffer; else arguments.{name} = nullptr;"
                ),
            };
        }
        let mut parameters = format!("#define {list}_BUFFERS const CONSTANT {numbers_name}& numbers BUFFER(0)");
        let mut of_arguments = format!("#define {list}_BUFFERS_OF(arguments) (const {numbers_name}&)arguments");
        for (index, bound) in fields.iter().enumerate() {
            let name = bound.name;
            let field = definition.fields.iter().find(|field| field.name == name);
            let pointer = field.map_or_else(String::new, |field| field.cpp_type.name());
            parameters += &format!(", \\\n    {pointer} {name}_buffer BUFFER({})", index + 1);
            of_arguments += &format!(", \\\n    arguments.{name}");
        }
        format!("{parameters}\n\n{of_arguments}\n\n{reads}\n")
    }
}
