//! The buffers that kernels are bound to, and the text by which a kernel reads its arguments from them.
//!
//! The structs of arguments are the structs of the CUDA kernels, with pointers. Candle binds buffers to indices, so
//! that it knows which ones a launch reads and writes. A kernel therefore gets the numbers of its struct as bytes, in
//! which a pointer is null or not, and pointers as buffers.

use candle_attention_cuda::shared::{CppType, KernelArguments, StructDefinition, StructHeader};

use crate::launch::MetalLaunch;

/// A field of some arguments that is bound as a buffer.
pub(crate) struct BoundField<A: 'static> {
    /// The name, after the names of the structs that it is in: `weight.scales.numbers`.
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

/// Lists fields of arguments, and of structs in them.
macro_rules! bound_fields {
    ($($field:ident $(.$inner:ident)*),* $(,)?) => {
        &[$($crate::bindings::BoundField {
            name: concat!(stringify!($field) $(, ".", stringify!($inner))*),
            address: |arguments| arguments.$field$(.$inner)*.address(),
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
    for field in flat_fields(definition) {
        let cpp_type = if is_pointer(field.cpp_type) { "u64".into() } else { field.cpp_type.name() };
        text += &format!("    {cpp_type} {};\n", field.flat_name());
    }
    text + &format!("}};\nstatic_assert(sizeof({of_numbers}) == sizeof({of_arguments}), \"the size in Rust\");\n")
}

/// Returns the name of the struct of the arguments as bytes.
fn numbers_name(definition: &StructDefinition) -> String {
    definition.name.replace("Arguments", "Numbers")
}

/// A field of a struct, or of a struct in it that has pointers.
struct FlatField {
    /// The name, after the names of the structs that it is in: `weight.scales.numbers`.
    name: String,
    cpp_type: CppType,
}

impl FlatField {
    /// Returns the name among the numbers and the parameters of a kernel.
    fn flat_name(&self) -> String {
        self.name.replace('.', "_")
    }
}

/// Returns the fields of a struct, in which the fields of structs with pointers take the place of these structs. A
/// struct of them has the same layout, since no struct of arguments has padding.
fn flat_fields(definition: &StructDefinition) -> Vec<FlatField> {
    let mut flat = Vec::new();
    for field in definition.fields {
        match field.cpp_type {
            CppType::Struct(inner) if has_pointers(inner) => {
                for own in flat_fields(inner) {
                    flat.push(FlatField { name: format!("{}.{}", field.name, own.name), ..own });
                }
            }
            cpp_type => flat.push(FlatField { name: field.name.into(), cpp_type }),
        }
    }
    flat
}

/// Returns whether a struct, or a struct in it, has pointers.
fn has_pointers(definition: &StructDefinition) -> bool {
    definition.fields.iter().any(|field| match field.cpp_type {
        CppType::Struct(inner) => has_pointers(inner),
        cpp_type => is_pointer(cpp_type),
    })
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
        let all = flat_fields(&definition);
        for field in &all {
            let (name, flat_name) = (&field.name, field.flat_name());
            let is_bound = fields.iter().any(|bound| bound.name == name);
            reads += &match (is_pointer(field.cpp_type), is_bound) {
                (false, _) => format!(" \\\n    arguments.{name} = numbers.{flat_name};"),
                (true, false) => format!(" \\\n    arguments.{name} = nullptr;"),
                (true, true) => format!(
                    " \\\n    if (numbers.{flat_name}) arguments.{name} = {flat_name}_buffer; else arguments.{name} = \
                     nullptr;"
                ),
            };
        }
        let mut parameters = format!("#define {list}_BUFFERS const CONSTANT {numbers_name}& numbers BUFFER(0)");
        let mut of_arguments = format!("#define {list}_BUFFERS_OF(arguments) (const {numbers_name}&)arguments");
        for (index, bound) in fields.iter().enumerate() {
            let Some(field) = all.iter().find(|field| field.name == bound.name) else { continue };
            let pointer = field.cpp_type.name();
            parameters += &format!(", \\\n    {pointer} {}_buffer BUFFER({})", field.flat_name(), index + 1);
            of_arguments += &format!(", \\\n    arguments.{}", field.name);
        }
        format!("{parameters}\n\n{of_arguments}\n\n{reads}\n")
    }
}
