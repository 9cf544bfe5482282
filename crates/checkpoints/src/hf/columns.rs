//! Structs of columns, which a row sets by name in a constant.

/// Declares a struct and its first value, in which each column has its default, and for each column a method of its
/// name that sets it.
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
pub(super) use columns;
