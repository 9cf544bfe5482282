//! SentencePiece's table of replaced characters (`precompiled_charsmap`): the size of a tree of bytes, the tree, and
//! the replacements, each of which ends with a zero.

/// Returns whether the nodes and replacements of each text are within a table. The tokenizer's own reader relies on it.
pub(super) fn is_sound(bytes: &[u8]) -> bool {
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return false };
    let size = u32::from_le_bytes(*size) as usize;
    let Some((tree, replacements)) = rest.split_at_checked(size) else { return false };
    let (nodes, remainder) = tree.as_chunks::<4>();
    let nodes: Vec<_> = nodes.iter().map(|node| TreeNode(u32::from_le_bytes(*node))).collect();
    let Ok(text) = str::from_utf8(replacements) else { return false };
    let Some(root) = nodes.first().filter(|_| remainder.is_empty()) else { return false };
    // The nodes after a byte are at the node's place, each at the bits that differ from the place by the byte.
    let mut is_seen = vec![false; nodes.len()];
    let mut places = vec![root.offset()];
    while let Some(place) = places.pop() {
        if place | 0xff >= nodes.len() {
            return false;
        }
        if std::mem::replace(&mut is_seen[place], true) {
            continue;
        }
        for byte in 1..=0xff {
            let node = nodes[place ^ byte];
            if node.label() != byte {
                continue;
            }
            let next = place ^ byte ^ node.offset();
            if node.has_replacement() {
                let Some(leaf) = nodes.get(next) else { return false };
                if !text.is_char_boundary(leaf.replacement()) {
                    return false;
                }
            }
            places.push(next);
        }
    }
    true
}

/// A node of the tree, as the library darts-clone packs it.
#[derive(Clone, Copy)]
struct TreeNode(u32);

impl TreeNode {
    /// Returns the byte of the node; above 255 for a replacement.
    fn label(self) -> usize {
        (self.0 & (1 << 31 | 0xff)) as usize
    }

    /// Returns the bits by which the place of the nodes after this one differs from its own place.
    fn offset(self) -> usize {
        let is_wide = self.0 & (1 << 9) != 0;
        ((self.0 >> 10) as usize) << if is_wide { 8 } else { 0 }
    }

    fn has_replacement(self) -> bool {
        self.0 >> 8 & 1 == 1
    }

    /// Returns the first byte of a replacement.
    fn replacement(self) -> usize {
        (self.0 & !(1 << 31)) as usize
    }
}
