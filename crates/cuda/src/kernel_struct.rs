//! Structs that are declared in Rust, with their documentation, and printed as C++ for the kernels that take them.

use std::hash::{Hash, Hasher};

/// A type that a field of a kernel's argument may have.
///
/// # Safety
/// The type has the size and the alignment of the C++ type.
pub unsafe trait KernelField: Copy {
    /// The type in C++.
    const TYPE: CppType;
}

/// A struct that `kernel_struct!` declares.
pub trait KernelStruct: KernelField {
    /// The declaration.
    const DEFINITION: StructDefinition;
}

/// A type in C++.
#[derive(Debug, Clone, Copy)]
pub enum CppType {
    /// A number, by its name.
    Number(&'static str),
    /// A pointer to numbers that kernels only read.
    Input(&'static str),
    /// A pointer to numbers that kernels may write.
    Output(&'static str),
    /// A struct that is declared in Rust.
    Struct(&'static StructDefinition),
}

/// A field of a struct.
#[derive(Debug, Clone, Copy)]
pub struct FieldDefinition {
    /// The lines of the documentation.
    pub docs: &'static [&'static str],
    /// The name.
    pub name: &'static str,
    /// The type.
    pub cpp_type: CppType,
}

/// A number that the kernels are compiled with.
#[derive(Debug, Clone, Copy)]
pub struct ConstantDefinition {
    /// The lines of the documentation.
    pub docs: &'static [&'static str],
    /// The name.
    pub name: &'static str,
    /// The value.
    pub value: i64,
}

/// The declaration of a struct. Declarations with the same name are equal.
#[derive(Debug, Clone, Copy)]
pub struct StructDefinition {
    /// The lines of the documentation.
    pub docs: &'static [&'static str],
    /// The name.
    pub name: &'static str,
    /// The fields in their order.
    pub fields: &'static [FieldDefinition],
    /// The constants that the struct's header defines besides.
    pub constants: &'static [ConstantDefinition],
    /// The size of the struct.
    pub bytes: usize,
}

/// A header that is printed from the declaration of a struct.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StructHeader {
    /// The name by which the kernels include it.
    pub name: String,
    /// The text of the header.
    pub text: String,
}

impl PartialEq for StructDefinition {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for StructDefinition {}

impl Hash for StructDefinition {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl StructDefinition {
    /// Returns the headers of the struct and of the structs in its fields.
    pub fn headers(&self) -> Vec<StructHeader> {
        let mut headers = vec![StructHeader { name: self.header_name(), text: self.text() }];
        for inner in self.inner_structs() {
            for header in inner.headers() {
                if !headers.contains(&header) {
                    headers.push(header);
                }
            }
        }
        headers
    }

    /// Returns the structs of fields.
    fn inner_structs(&self) -> Vec<&'static Self> {
        let mut inner: Vec<&'static Self> = Vec::new();
        for field in self.fields {
            if let CppType::Struct(definition) = field.cpp_type
                && !inner.contains(&definition)
            {
                inner.push(definition);
            }
        }
        inner
    }

    /// Returns the name of the header: that of the struct in lower case, such as `gate_arguments.cuh`.
    pub fn header_name(&self) -> String {
        let mut name = String::new();
        for letter in self.name.chars() {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('_');
            }
            name.extend(letter.to_lowercase());
        }
        name + ".cuh"
    }

    /// Returns the text of the header.
    fn text(&self) -> String {
        let mut text = String::from("#pragma once\n#include \"device.cuh\"\n");
        for inner in self.inner_structs() {
            text += &format!("#include \"{}\"\n", inner.header_name());
        }
        for constant in self.constants {
            text.push('\n');
            add_docs(&mut text, "", constant.docs);
            text += &format!("#define {} {}\n", constant.name, constant.value);
        }
        text.push('\n');
        add_docs(&mut text, "", self.docs);
        text += &format!("struct {} {{\n", self.name);
        for field in self.fields {
            add_docs(&mut text, "    ", field.docs);
            text += &format!("    {} {};\n", field.cpp_type.name(), field.name);
        }
        text + &format!("}};\nstatic_assert(sizeof({}) == {}, \"the size in Rust\");\n", self.name, self.bytes)
    }
}

impl CppType {
    /// Returns the name of the type in C++.
    pub fn name(self) -> String {
        match self {
            Self::Number(name) => name.into(),
            Self::Input(pointee) => format!("GLOBAL const {pointee}*"),
            Self::Output(pointee) => format!("GLOBAL {pointee}*"),
            Self::Struct(definition) => definition.name.into(),
        }
    }
}

/// Adds lines of documentation as comments.
fn add_docs(text: &mut String, indent: &str, docs: &[&str]) {
    for line in docs {
        *text += format!("{indent}//{line}").trim_end();
        text.push('\n');
    }
}

/// Declares a struct that is the argument of kernels, or a part of one: in Rust as `#[repr(C)]`, and as the text of a
/// header for C++. Every field is documented, since the header has the same comments.
///
/// The constants after the struct are constants of the Rust module and macros of the header.
macro_rules! kernel_struct {
    (
        $(#[doc = $doc:literal])+
        $visibility:vis struct $Name:ident {
            $(
                $(#[doc = $field_doc:literal])+
                $field_visibility:vis $field:ident: $Field:ty,
            )+
        }
        $(
            $(#[doc = $constant_doc:literal])+
            $constant_visibility:vis const $CONSTANT:ident: $Constant:ty = $value:expr;
        )*
    ) => {
        $(#[doc = $doc])+
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default)]
        $visibility struct $Name {
            $(
                $(#[doc = $field_doc])+
                $field_visibility $field: $Field,
            )+
        }

        $(
            $(#[doc = $constant_doc])+
            $constant_visibility const $CONSTANT: $Constant = $value;
        )*

        const _: () = assert!(size_of::<$Name>() == 0 $(+ size_of::<$Field>())+, "the struct has padding");

        // SAFETY: C++ lays the fields out as `repr(C)`, in this order. The types of the fields have the same sizes and
        // alignments there, there is no padding, and the header compares the size of the struct.
        unsafe impl $crate::kernel_struct::KernelField for $Name {
            const TYPE: $crate::kernel_struct::CppType = $crate::kernel_struct::CppType::Struct(
                &<Self as $crate::kernel_struct::KernelStruct>::DEFINITION,
            );
        }

        impl $crate::kernel_struct::KernelStruct for $Name {
            const DEFINITION: $crate::kernel_struct::StructDefinition = $crate::kernel_struct::StructDefinition {
                docs: &[$($doc),+],
                name: stringify!($Name),
                fields: &[$(
                    $crate::kernel_struct::FieldDefinition {
                        docs: &[$($field_doc),+],
                        name: stringify!($field),
                        cpp_type: <$Field as $crate::kernel_struct::KernelField>::TYPE,
                    },
                )+],
                constants: &[$(
                    $crate::kernel_struct::ConstantDefinition {
                        docs: &[$($constant_doc),+],
                        name: stringify!($CONSTANT),
                        value: $CONSTANT as i64,
                    },
                )*],
                bytes: size_of::<Self>(),
            };
        }
    };
}
pub(crate) use kernel_struct;

#[cfg(test)]
mod tests {
    use super::*;

    kernel_struct! {
        /// Two numbers.
        struct TwoNumbers {
            /// The first one.
            first: i64,
            /// The second one.
            second: i64,
        }
    }

    kernel_struct! {
        /// The argument of a kernel.
        ///
        /// It has two sentences.
        struct ExampleArguments {
            /// (B, T).
            /// May be null.
            inputs: crate::kernel_pointers::InputPointer<f32>,
            /// Bytes.
            codes: crate::kernel_pointers::OutputPointer<u8>,
            /// Strides.
            strides: TwoNumbers,
            /// A size.
            width: i32,
            /// A factor.
            factor: f32,
        }
        /// The warps of a block.
        const EXAMPLE_WARPS: usize = 4;
    }

    #[test]
    fn struct_is_printed_with_its_comments_and_the_structs_of_its_fields() {
        let headers = ExampleArguments::DEFINITION.headers();
        let names: Vec<_> = headers.iter().map(|header| header.name.as_str()).collect();
        assert_eq!(names, ["example_arguments.cuh", "two_numbers.cuh"]);
        let expected = "#pragma once\n#include \"device.cuh\"\n#include \"two_numbers.cuh\"\n\n\
            // The warps of a block.\n#define EXAMPLE_WARPS 4\n\n\
            // The argument of a kernel.\n//\n// It has two sentences.\n\
            struct ExampleArguments {\n    // (B, T).\n    // May be null.\n    GLOBAL const float* inputs;\n    // Bytes.\n    \
            GLOBAL u8* codes;\n    // Strides.\n    TwoNumbers strides;\n    // A size.\n    int width;\n    // A factor.\n    \
            float factor;\n};\nstatic_assert(sizeof(ExampleArguments) == 40, \"the size in Rust\");\n";
        assert_eq!(headers[0].text, expected);
        assert_eq!(EXAMPLE_WARPS, 4);
    }
}
