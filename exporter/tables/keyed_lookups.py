"""What can be looked up in a table by keys, whatever turns its keys into row numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Tensor = Any


class TableLookups(ABC):
    """Lookups of a table whose rows are those of the variable `values`."""

    values: Any

    @abstractmethod
    def _rows_of(self, ids: Tensor) -> Tensor:
        """The row number of each id of an int64 tensor, in its shape."""

    def rows(self, ids: Any) -> Any:
        """The row number of each id, of a tensor of any shape, a SparseTensor or a RaggedTensor."""
        import tensorflow as tf

        if isinstance(ids, tf.SparseTensor):
            return tf.SparseTensor(ids.indices, self.rows(ids.values), ids.dense_shape)
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.rows(ids.flat_values))
        return self._rows_of(tf.cast(ids, tf.int64))

    def lookup(self, ids: Any) -> Any:
        """The rows of ids, of shape `ids.shape + [dim]`; ragged for ragged ids."""
        import tensorflow as tf

        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.lookup(ids.flat_values))
        return tf.nn.embedding_lookup(self.values, self.rows(ids))

    def lookup_sparse(self, ids: Any, weights: Any = None, combiner: str = "mean") -> Any:
        """The combined rows of each row of a SparseTensor; `combiner` is "sum", "mean" or "sqrtn"."""
        import tensorflow as tf

        return tf.nn.embedding_lookup_sparse(self.values, self.rows(ids), weights, combiner=combiner)
