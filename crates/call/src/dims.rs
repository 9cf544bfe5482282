//! The dimensions of a call, and its rows: query rows are numbered within the key head that they share.

/// The dimensions of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionDims {
    /// B: sequences in the batch.
    pub b: usize,
    /// H: query heads.
    pub h: usize,
    /// H_kv: key and value heads, which divide H. Query head h reads key head h / (H / H_kv).
    pub h_kv: usize,
    /// T_q: queries in a sequence.
    pub t_q: usize,
    /// T_kv: keys in a sequence.
    pub t_kv: usize,
    /// D: the head dimension of queries and keys.
    pub d: usize,
    /// D_v: the head dimension of values.
    pub d_v: usize,
}

impl AttentionDims {
    /// Returns the number of query heads that share a key head.
    #[inline]
    pub fn group(&self) -> usize {
        self.h / self.h_kv
    }

    /// Returns the number of query rows that share a key head: row `i · group + g` is query i of the g-th head of the
    /// group, so that neighbouring rows attend to nearly the same keys.
    #[inline]
    pub fn rows(&self) -> usize {
        self.t_q * self.group()
    }

    /// Returns the number of queries in the batch, B·H·T_q.
    #[inline]
    pub fn queries(&self) -> usize {
        self.b * self.h * self.t_q
    }

    /// Returns the number of key heads in the batch, B·H_kv.
    #[inline]
    pub fn kv_heads(&self) -> usize {
        self.b * self.h_kv
    }

    /// Returns the query and its head for a row of a key head.
    #[inline]
    pub fn row(&self, kv: KvHead, row: usize) -> QueryRow {
        QueryRow { b: kv.b, head: self.query_head(kv, row % self.group()), query: row / self.group() }
    }

    /// Returns the n-th of the query heads that share a key head, counted from 0.
    #[inline]
    pub fn query_head(&self, kv: KvHead, n: usize) -> usize {
        kv.head * self.group() + n
    }

    /// Returns the index of a row in (B, H, T_q).
    #[inline]
    pub fn row_index(&self, row: QueryRow) -> usize {
        (row.b * self.h + row.head) * self.t_q + row.query
    }

    /// Returns the key head with an index below B·H_kv.
    #[inline]
    pub fn kv_head(&self, index: usize) -> KvHead {
        KvHead { b: index / self.h_kv, head: index % self.h_kv }
    }

    /// Returns the index of a key head, below B·H_kv.
    #[inline]
    pub fn kv_index(&self, kv: KvHead) -> usize {
        kv.b * self.h_kv + kv.head
    }
}

/// A key head of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvHead {
    /// The index of the sequence, below B.
    pub b: usize,
    /// The index of the key head, below H_kv.
    pub head: usize,
}

/// A query of a head of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryRow {
    /// The index of the sequence, below B.
    pub b: usize,
    /// The index of the query head, below H.
    pub head: usize,
    /// The index of the query, below T_q.
    pub query: usize,
}
