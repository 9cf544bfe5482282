//! Structs whose fields are the columns of a table: of model types, and of GGUF's architectures.

/// The name of a field with a number, and its default.
#[derive(Clone, Copy)]
pub(super) struct Number(pub &'static str, pub f64);

/// Declares a struct, its first value, in which each column has its default, and for each column a method that sets it
/// and has its name.
macro_rules! columns {
    (
        $(#[$about:meta])* struct $name:ident, $(#[$of_first:meta])* first $first:ident:
        $($(#[$doc:meta])* $column:ident: $kind:ty = $default:expr,)+
        [None unless set] $($(#[$of:meta])* $option:ident: $some:ty,)*
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy)]
        pub(super) struct $name {
            $($(#[$doc])* pub $column: $kind,)+
            $($(#[$of])* pub $option: Option<$some>,)*
        }

        impl $name {
            $(#[$of_first])*
            pub const $first: Self = Self { $($column: $default,)+ $($option: None,)* };

            $($(#[$doc])* pub const fn $column(self, $column: $kind) -> Self { Self { $column, ..self } })+
            $($(#[$of])* pub const fn $option(self, value: $some) -> Self { Self { $option: Some(value), ..self } })*
        }
    };
}
pub(crate) use columns;
