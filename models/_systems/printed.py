"""What the tutorials print, and the stored tensors rounded to the same number of digits."""

# fmt: off
# Both sequences of a batch are the same six tokens, so each number occurs twice in the output.
BOOK_STACK = (
    -0.4519, 0.2216, 0.4772, 0.1063, -0.5874, 0.0058, 0.5891, 0.3257, -0.6300, -0.0632, 0.6202, 0.3860,
    -0.5675, -0.0843, 0.5478, 0.3589, -0.5526, -0.0981, 0.5321, 0.3428, -0.5299, -0.1081, 0.5077, 0.3493,
)
SHORT_STACK = (
    0.1855, 0.8812, 1.3211, 0.8098, 0.3116, 0.9549, 1.6063, 1.1493, 0.3395, 0.9652, 1.6530, 1.2084,
    0.3129, 0.8747, 1.5012, 1.0955, 0.2865, 0.7897, 1.4100, 1.0398, 0.2990, 0.8040, 1.4025, 1.0361,
)
SHORT_MHA = (
    0.1184, 0.3120, -0.0847, -0.5774, 0.0178, 0.3221, -0.0763, -0.4225, -0.0147, 0.3259, -0.0734, -0.3721,
    -0.0116, 0.3138, -0.0708, -0.3624, -0.0117, 0.2973, -0.0698, -0.3543, -0.0132, 0.2990, -0.0689, -0.3490,
)
PRODUCTS = (
    3.2120, 3.9520, 4.0759, 3.9520, 4.9100, 5.0715, 4.0759, 5.0715, 5.2395,
    4.3167, 4.0362, 4.0373, 4.0362, 3.7750, 3.7754, 4.0373, 3.7754, 3.7763,
)
WEIGHTED = (0.0779, 0.2156, 0.1057, 0.0504, 0.1382, 0.1972, 0.1237, 0.3983, 0.3390)
# fmt: on

# What, folder, case, tensor, values, digits: after the point ("f") or significant ("g").
PRINTED = (
    ("context vectors of the stacked heads", "book_stack", "main", "output", BOOK_STACK * 2, ".4f"),
    ("context vectors of the stacked raw heads", "short_stack_raw", "main", "output", SHORT_STACK * 2, ".4f"),
    ("context vectors of the split heads", "short_mha", "main", "output", SHORT_MHA * 2, ".4f"),
    ("the batched product", "batched_matmul", "main", "output", PRODUCTS, ".4f"),
    ("the products head by head", "batched_matmul", "main", "output", PRODUCTS, ".4f"),
    ("each token's share, feature by feature", "shiny_sun", "main", "weighted", WEIGHTED, ".4f"),
    ('the context vector of "shiny"', "shiny_sun", "main", "output", (0.3992, 0.3858, 0.8610), ".4f"),
    ("scores", "qkv_2x2", "main", "scores", (8.0, 14.0, 18.0, 32.0), ".4f"),
    ("scaled scores", "qkv_2x2", "main", "scaled", (5.6569, 9.8995, 12.7279, 22.6274), ".4f"),
    ("attention weights", "qkv_2x2", "main", "attn_weights", (0.014166, 0.98583, 5.0198e-05, 0.99995), ".5g"),
    ("context", "qkv_2x2", "main", "output", (0.2972, 0.3972, 0.3000, 0.4000), ".4f"),
)


def printed_numbers(records):
    """The list for printed_numbers.json; `digits_equal` tells of each printed value whether the stored one rounds to it."""
    entries = []
    for what, folder, case, tensor, values, digits in PRINTED:
        stored = records[folder].io[f"{case}.{tensor}"].flatten().tolist()
        if len(stored) != len(values):
            raise SystemExit(
                f"printed_numbers: {folder}.{case}.{tensor} has {len(stored)} numbers, the tutorial prints {len(values)}"
            )
        equal = [format(mine, digits) == format(printed, digits) for mine, printed in zip(stored, values)]
        entries.append(
            {
                "what": what,
                "folder": folder,
                "case": case,
                "tensor": tensor,
                "values": list(values),
                "digits_equal": equal,
            }
        )
    return entries
