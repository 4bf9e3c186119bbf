"""Names that a Keras archive may give without being trusted: each stands for something that was looked at.

A config names classes and functions, which Keras makes and calls while it makes the model, with arguments
from the config. Whoever writes an archive chooses the names. So these lists have what only describes a model
or adds nodes to a graph: it opens no file but those of the keys in `archived_model`, calls no function that
it is given, and leaves the process as it was, whatever JSON can hold as its arguments. What is not here is
not known to be harmless; a layer of a later Keras is one of these until somebody has read it.
`tests/graph/test_archive_names.py` compares the lists with the installed libraries.
"""

from __future__ import annotations


def _names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


_LAYERS = """
    Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D
    AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
    AdditiveAttention AlphaDropout Attention AugMix AutoContrast Average AveragePooling1D
    AveragePooling2D AveragePooling3D AvgPool1D AvgPool2D AvgPool3D BatchNormalization
    BatchNormalizationV1 BatchNormalizationV2 Bidirectional CategoryEncoding CenterCrop Concatenate
    ContrastLimitedAdaptiveHistogramEqualization Conv1D Conv1DTranspose Conv2D Conv2DTranspose Conv3D
    Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D Convolution1D Convolution1DTranspose Convolution2D
    Convolution2DTranspose Convolution3D Convolution3DTranspose Cropping1D Cropping2D Cropping3D
    CuDNNGRU CuDNNLSTM CutMix Dense DenseFeatures DepthwiseConv1D DepthwiseConv2D Discretization Dot
    Dropout ELU EinsumDense Embedding Equalization Flatten GRU GRUCell GRUCellV1 GRUCellV2 GRUV1 GRUV2
    GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D
    GlobalAvgPool1D GlobalAvgPool2D GlobalAvgPool3D GlobalMaxPool1D GlobalMaxPool2D GlobalMaxPool3D
    GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GroupNormalization GroupQueryAttention
    GroupedQueryAttention HashedCrossing Hashing Identity InputLayer IntegerLookup LSTM LSTMCell
    LSTMCellV1 LSTMCellV2 LSTMV1 LSTMV2 LayerNormalization LeakyReLU LocallyConnected1D
    LocallyConnected2D Masking MaxNumBoundingBoxes MaxPool1D MaxPool2D MaxPool3D MaxPooling1D
    MaxPooling2D MaxPooling3D Maximum MelSpectrogram Minimum MixUp MultiHeadAttention Multiply
    Normalization PReLU Permute Pipeline RMSNormalization RNN RandAugment RandomBrightness
    RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop RandomElasticTransform
    RandomErasing RandomFlip RandomFourierFeatures RandomGaussianBlur RandomGrayscale RandomHeight
    RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation RandomSaturation
    RandomSharpness RandomShear RandomTranslation RandomWidth RandomZoom ReLU RepeatVector Rescaling
    Reshape Resizing ReversibleEmbedding STFTSpectrogram SeparableConv1D SeparableConv2D
    SeparableConvolution1D SeparableConvolution2D SequenceFeatures SimpleRNN SimpleRNNCell Softmax
    Solarization SpatialDropout1D SpatialDropout2D SpatialDropout3D SpectralNormalization
    StackedRNNCells StringLookup Subtract SyncBatchNormalization TextVectorization ThresholdedReLU
    TimeDistributed UnitNormalization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D
    ZeroPadding3D
"""
"""Of Keras 3 and 2. Not among them: Lambda, and what wraps a model of another library or file."""

_INNER_LAYERS = """
    AddLoss AddMetric CustomScaleLayer LayerScale StochasticDepth TFDConcat TFDIdentity
"""
"""Layers that Keras makes for its own models, and for losses and metrics added to one."""

_MODELS = "Functional LinearModel Model Sequential WideDeepModel"

_VALUES = """
    AWQConfig AWQDTypePolicy AbsMaxQuantizer Constant ConstantV2 DTypePolicy DTypePolicyMap
    Float8QuantizationConfig FloatDTypePolicy GPTQConfig GPTQDTypePolicy GlorotNormal GlorotNormalV2
    GlorotUniform GlorotUniformV2 HeNormal HeNormalV2 HeUniform HeUniformV2 Identity IdentityInitializer
    IdentityV2 InputSpec Int4DTypePolicy Int4QuantizationConfig Int8QuantizationConfig L1 L1L2 L2
    LecunNormal LecunNormalV2 LecunUniform LecunUniformV2 MaxNorm MinMaxNorm NonNeg Ones OnesV2
    Orthogonal OrthogonalInitializer OrthogonalRegularizer OrthogonalV2 Policy QuantizedDTypePolicy
    QuantizedFloat8DTypePolicy RadialConstraint RandomNormal RandomNormalV2 RandomUniform
    RandomUniformV2 STFT STFTInitializer SeedGenerator TruncatedNormal TruncatedNormalV2 UnitNorm
    VarianceScaling VarianceScalingV2 Zeros ZerosV2 constant glorot_normal glorot_normalV2
    glorot_uniform glorot_uniformV2 he_normal he_normalV2 he_uniform he_uniformV2 identity l1 l1_l2 l2
    lecun_normal lecun_normalV2 lecun_uniform lecun_uniformV2 max_norm maxnorm min_max_norm non_neg
    nonneg normal one ones orthogonal orthogonal_regularizer radial_constraint random_normal
    random_uniform stft truncated_normal uniform unit_norm unitnorm variance_scaling zero zeros
"""
"""Initialisers, regularisers, constraints (Keras 2 also had them in small letters), types, quantizations."""

_COLUMNS = """
    BucketizedColumn CrossedColumn EmbeddingColumn HashedCategoricalColumn IdentityCategoricalColumn
    IndicatorColumn NumericColumn SequenceCategoricalColumn SequenceNumericColumn SharedEmbeddingColumn
    VocabularyFileCategoricalColumn VocabularyListCategoricalColumn WeightedCategoricalColumn
"""

_OPERATIONS = """
    Abs Absolute AdaptiveAveragePool AdaptiveMaxPool Add AffineTransform All AllClose Amax Amin Angle
    Any Append Arange Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh Argmax Argmin Argpartition
    Argsort Array ArraySplit Average AveragePool BatchNorm BinaryCrossentropy Bincount BitwiseAnd
    BitwiseInvert BitwiseLeftShift BitwiseNot BitwiseOr BitwiseRightShift BitwiseXor BroadcastTo CDist
    CTCDecode CTCLoss Cast CategoricalCrossentropy Cbrt Ceil Celu Cholesky CholeskyInverse Clip
    Concatenate Conj Conjugate Conv ConvTranspose ConvertToTensor Copy Corrcoef Correlate Cos Cosh
    CountNonzero CropImages Cross Cumprod Cumsum Deg2rad DepthToSpace DepthwiseConv Det Diag Diagflat
    Diagonal Diff Digitize Divide DivideNoNan Dot DotProductAttention Dsplit Dstack Eig Eigh Einsum
    ElasticTransform Elu EmptyLike Equal Erf Erfc Erfinv Exp Exp2 ExpandDims Expm1 ExtractPatches
    ExtractSequences FFT FFT2 Fabs FakeQuantWithMinMaxVars Flip Fliplr Flipud Floor FloorDivide Fmax
    Fmin Fmod Fold Full FullLike GaussianBlur Gcd Gelu Geomspace GetItem Glu Greater GreaterEqual
    HSVToRGB HardShrink HardSigmoid HardSilu HardTanh Heaviside Histogram Hsplit Hstack Hypot I0 IFFT2
    IRFFT ISTFT Imag InTopK Inner Inv IsIn Isclose Isfinite Isinf Isnan Isneginf Isposinf Isreal Kron
    LayerNorm Lcm Ldexp LeakyRelu LeftShift Less LessEqual Linspace Log Log10 Log1p Log2 LogSigmoid
    LogSoftmax Logaddexp Logaddexp2 Logdet LogicalAnd LogicalNot LogicalOr LogicalXor Logspace Logsumexp
    Lstsq LuFactor MapCoordinates Matmul MatrixRank Max MaxPool Maximum Mean Median Meshgrid Min Minimum
    Mish Mod Moments Moveaxis MultiHot Multiply NanToNum Nanargmax Nanargmin Nancumprod Nancumsum Nanmax
    Nanmean Nanmedian Nanmin Nanpercentile Nanprod Nanquantile Nanstd Nansum Nanvar Ndim Negative
    Nextafter Nonzero Norm Normalize NotEqual OneHot OnesLike Outer PSNR Pad PadImages Percentile
    PerspectiveTransform Pinv Polar Power Prod Ptp Qr Quantile RFFT RGBToGrayscale RGBToHSV RMSNorm
    Rad2deg Ravel ReLU Real Rearrange Reciprocal Relu Relu6 Repeat Reshape Resize RightShift Roll Rot90
    Round Rsqrt SSIM STFT SVD SaturateCast ScaleAndTranslate Scatter ScatterUpdate SearchSorted
    SegmentMax SegmentMin SegmentProd SegmentSum Select Selu SeparableConv Sigmoid Sign Signbit Silu Sin
    Sinc Sinh Size Slice SliceUpdate Slogdet SobelEdges SoftShrink Softmax Softplus Softsign Solve
    SolveTriangular Sort SpaceToDepth SparseCategoricalCrossentropy SparsePlus SparseSigmoid Sparsemax
    Split Sqrt Square Squareplus Squeeze Stack Std StopGradient Subtract Sum Swapaxes Take TakeAlongAxis
    Tan Tanh TanhShrink Tensordot Threshold Tile TopK Trace Transpose Trapezoid Tril Triu TrueDivide
    Trunc Unfold Unique UnravelIndex Unstack Vander Var Vdot View ViewAsComplex ViewAsReal Vsplit Vstack
    Where ZerosLike
"""
"""What Keras 3 makes of `x + 1` and of a call of `keras.ops`, except for those that call a function."""

CLASSES = _names(_LAYERS, _INNER_LAYERS, _MODELS, _VALUES, _COLUMNS, _OPERATIONS)

PLAIN_VALUES = _names(
    "__tensor__ __numpy__ __bytes__ __ellipsis__ __slice__ __tuple__ __keras_tensor__ TensorShape"
)
"""What a config writes for values that JSON lacks. `__lambda__` is code, and `__typespec__` a class."""

TYPE_SPECS = _names("TensorSpec SparseTensorSpec RaggedTensorSpec")

FUNCTIONS = _names("""
    abs absolute celu cos elu erf exp exponential gelu glu hard_shrink hard_sigmoid hard_silu hard_swish
    hard_tanh leaky_relu linear log log1p log_sigmoid log_softmax mish normalize relu relu6 selu sigmoid
    sign silu sin soft_shrink softmax softplus softsign sparse_plus sparse_sigmoid sparsemax sqrt square
    squareplus swish tanh tanh_shrink threshold
""")
"""Activations."""

RAGGED_MAKERS = _names("""
    from_nested_row_lengths from_nested_row_splits from_nested_value_rowids from_row_lengths
    from_row_limits from_row_splits from_row_starts from_sparse from_tensor from_uniform_row_length
    from_value_rowids
""")
"""Class methods of tf.RaggedTensor that Keras 2 keeps as layers (`ClassMethod`)."""

TENSOR_MEMBERS = _names("""
    bounding_shape dense_shape flat_values indices merge_dims nested_row_lengths nested_row_splits
    nested_value_rowids nrows row_lengths row_limits row_splits row_starts to_sparse to_tensor
    value_rowids values with_flat_values with_row_splits_dtype with_values
""")
"""Properties and methods of sparse and ragged tensors that Keras 2 keeps as layers (`InstanceMethod`)."""

_GRAPH_FUNCTIONS = {
    "": """
        approx_top_k argsort batch_to_space bitcast boolean_mask broadcast_dynamic_shape
        broadcast_static_shape broadcast_to cast clip_by_global_norm clip_by_norm clip_by_value
        concat constant convert_to_tensor dynamic_partition dynamic_stitch edit_distance einsum
        ensure_shape expand_dims extract_volume_patches eye fftnd fill fingerprint gather gather_nd
        guarantee_const histogram_fixed_width histogram_fixed_width_bins identity identity_n ifftnd
        irfftnd linspace meshgrid norm one_hot ones ones_like pad parallel_stack
        random_index_shuffle range rank realdiv repeat required_space_to_batch_paddings reshape
        reverse reverse_sequence rfftnd roll scatter_nd searchsorted sequence_mask shape shape_n
        size slice sort space_to_batch space_to_batch_nd split squeeze stack stop_gradient
        strided_slice tensor_scatter_nd_add tensor_scatter_nd_max tensor_scatter_nd_min
        tensor_scatter_nd_sub tensor_scatter_nd_update tensordot tile transpose truncatediv
        truncatemod unique unique_with_counts unravel_index unstack where zeros zeros_like""",
    "__operators__": "add eq getitem ne ragged_getitem",
    "audio": "decode_wav encode_wav",
    "bitwise": "bitwise_and bitwise_or bitwise_xor invert left_shift right_shift",
    "debugging": "check_numerics",
    "dtypes": "complex saturate_cast",
    "image": """
        adjust_brightness adjust_contrast adjust_gamma adjust_hue adjust_jpeg_quality
        adjust_saturation central_crop combined_non_max_suppression convert_image_dtype
        crop_and_resize crop_to_bounding_box draw_bounding_boxes extract_glimpse extract_patches
        flip_left_right flip_up_down generate_bounding_box_proposals grayscale_to_rgb hsv_to_rgb
        image_gradients non_max_suppression non_max_suppression_overlaps non_max_suppression_padded
        non_max_suppression_with_scores pad_to_bounding_box per_image_standardization psnr
        random_brightness random_contrast random_crop random_flip_left_right random_flip_up_down
        random_hue random_jpeg_quality random_saturation resize resize_with_crop_or_pad
        resize_with_pad rgb_to_grayscale rgb_to_hsv rgb_to_yiq rgb_to_yuv rot90
        sample_distorted_bounding_box sobel_edges ssim ssim_multiscale stateless_random_brightness
        stateless_random_contrast stateless_random_crop stateless_random_flip_left_right
        stateless_random_flip_up_down stateless_random_hue stateless_random_jpeg_quality
        stateless_random_saturation stateless_sample_distorted_bounding_box total_variation
        transpose yiq_to_rgb yuv_to_rgb""",
    "io": """
        decode_and_crop_jpeg decode_base64 decode_bmp decode_csv decode_gif decode_image decode_jpeg
        decode_json_example decode_jxl decode_png decode_raw decode_webp encode_base64 encode_jpeg
        encode_png extract_jpeg_shape is_jpeg parse_tensor serialize_tensor""",
    "linalg": """
        adjoint band_part banded_triangular_solve cholesky cholesky_solve cross det diag diag_part
        eig eigh eigh_tridiagonal eigvals eigvalsh expm global_norm inv logdet logm lstsq lu
        lu_matrix_inverse lu_reconstruct lu_solve matmul matrix_rank matrix_transpose matvec
        normalize pinv qr set_diag slogdet solve sqrtm svd tensor_diag tensor_diag_part trace
        triangular_solve tridiagonal_matmul tridiagonal_solve""",
    "math": """
        abs accumulate_n acos acosh add add_n angle approx_max_k approx_min_k argmax argmin asin
        asinh atan atan2 atanh bessel_i0 bessel_i0e bessel_i1 bessel_i1e betainc bincount ceil
        confusion_matrix conj cos cosh count_nonzero cumprod cumsum cumulative_logsumexp digamma
        divide divide_no_nan equal erf erfc erfcinv erfinv exp expm1 floor floordiv floormod greater
        greater_equal igamma igammac imag in_top_k invert_permutation is_finite is_inf is_nan
        is_non_decreasing is_strictly_increasing l2_normalize lbeta less less_equal lgamma log log1p
        log_sigmoid logical_and logical_not logical_or logical_xor maximum minimum multiply
        multiply_no_nan ndtri negative nextafter not_equal polygamma polyval pow real reciprocal
        reciprocal_no_nan reduce_all reduce_any reduce_euclidean_norm reduce_logsumexp reduce_max
        reduce_mean reduce_min reduce_prod reduce_std reduce_sum reduce_variance rint round rsqrt
        scalar_mul segment_max segment_mean segment_min segment_prod segment_sum sigmoid sign sin
        sinh sobol_sample softplus sqrt square squared_difference subtract tan tanh top_k truediv
        unsorted_segment_max unsorted_segment_mean unsorted_segment_min unsorted_segment_prod
        unsorted_segment_sqrt_n unsorted_segment_sum xdivy xlog1py xlogy zero_fraction zeta""",
    "math.special": """
        bessel_j0 bessel_j1 bessel_k0 bessel_k0e bessel_k1 bessel_k1e bessel_y0 bessel_y1 dawsn
        expint fresnel_cos fresnel_sin spence""",
    "nn": """
        atrous_conv2d atrous_conv2d_transpose avg_pool avg_pool1d avg_pool2d avg_pool3d
        batch_norm_with_global_normalization batch_normalization bias_add collapse_repeated
        compute_accidental_hits conv1d conv1d_transpose conv2d conv2d_transpose conv3d
        conv3d_transpose conv_transpose convolution crelu ctc_beam_search_decoder ctc_greedy_decoder
        ctc_loss ctc_unique_labels depth_to_space depthwise_conv2d depthwise_conv2d_backprop_filter
        depthwise_conv2d_backprop_input dilation2d dropout elu embedding_lookup
        embedding_lookup_sparse erosion2d fractional_avg_pool fractional_max_pool gelu
        isotonic_regression l2_loss leaky_relu local_response_normalization log_poisson_loss
        log_softmax max_pool max_pool1d max_pool2d max_pool3d max_pool_with_argmax moments nce_loss
        normalize_moments pool relu relu6 safe_embedding_lookup_sparse sampled_softmax_loss selu
        separable_conv2d sigmoid_cross_entropy_with_logits silu softmax
        softmax_cross_entropy_with_logits softsign space_to_depth
        sparse_softmax_cross_entropy_with_logits sufficient_statistics
        weighted_cross_entropy_with_logits weighted_moments""",
    "quantization": """
        dequantize fake_quant_with_min_max_args fake_quant_with_min_max_vars
        fake_quant_with_min_max_vars_per_channel quantize quantize_and_dequantize
        quantize_and_dequantize_v2 quantized_concat""",
    "ragged": """
        boolean_mask constant cross cross_hashed range row_splits_to_segment_ids
        segment_ids_to_row_splits stack stack_dynamic_partitions""",
    "random": """
        categorical gamma normal poisson shuffle stateless_binomial stateless_categorical
        stateless_gamma stateless_normal stateless_parameterized_truncated_normal stateless_poisson
        stateless_truncated_normal stateless_uniform truncated_normal uniform""",
    "sets": "difference intersection size union",
    "signal": """
        dct fft fft2d fft3d fftnd fftshift frame hamming_window hann_window idct ifft ifft2d ifft3d
        ifftnd ifftshift inverse_mdct inverse_stft irfft irfft2d irfft3d irfftnd
        kaiser_bessel_derived_window kaiser_window linear_to_mel_weight_matrix mdct
        mfccs_from_log_mel_spectrograms overlap_and_add rfft rfft2d rfft3d rfftnd stft vorbis_window""",
    "sparse": """
        add bincount concat cross cross_hashed expand_dims eye fill_empty_rows from_dense mask
        maximum minimum reduce_max reduce_sum reorder reset_shape reshape retain sampled_addmm
        segment_mean segment_sqrt_n segment_sum slice softmax sparse_dense_matmul split to_dense
        to_indicator transpose""",
    "strings": """
        as_string bytes_split format join length lower ngrams reduce_join regex_full_match
        regex_replace split strip substr to_hash_bucket to_hash_bucket_fast to_hash_bucket_strong
        to_number unicode_decode unicode_decode_with_offsets unicode_encode unicode_script
        unicode_split unicode_split_with_offsets unicode_transcode unsorted_segment_join upper""",
    "compat.v1": """
        arg_max arg_min batch_gather batch_to_space batch_to_space_nd boolean_mask
        clip_by_average_norm constant convert_to_tensor decode_raw div expand_dims floor_div gather
        gather_nd norm ones_like pad quantize_v2 reverse_sequence setdiff1d shape size sparse_matmul
        sparse_to_dense squeeze string_split substr to_bfloat16 to_complex128 to_complex64 to_double
        to_float to_int32 to_int64 transpose where zeros_like""",
    "compat.v1.image": """
        crop_and_resize draw_bounding_boxes extract_glimpse extract_image_patches resize_area
        resize_bicubic resize_bilinear resize_image_with_pad resize_images resize_nearest_neighbor
        sample_distorted_bounding_box""",
    "compat.v1.math": """
        argmax argmin bincount confusion_matrix count_nonzero in_top_k reduce_all reduce_any
        reduce_logsumexp reduce_max reduce_mean reduce_min reduce_prod reduce_sum scalar_mul""",
    "compat.v1.nn": """
        avg_pool batch_norm_with_global_normalization conv1d conv2d conv2d_backprop_filter
        conv2d_backprop_input conv2d_transpose conv3d conv3d_backprop_filter conv3d_transpose
        convolution crelu ctc_beam_search_decoder ctc_loss ctc_loss_v2 depth_to_space
        depthwise_conv2d depthwise_conv2d_native dilation2d dropout embedding_lookup
        embedding_lookup_sparse erosion2d fractional_avg_pool fractional_max_pool fused_batch_norm
        log_softmax max_pool max_pool_with_argmax moments nce_loss pool quantized_avg_pool
        quantized_conv2d quantized_max_pool quantized_relu_x relu_layer safe_embedding_lookup_sparse
        sampled_softmax_loss separable_conv2d sigmoid_cross_entropy_with_logits softmax
        softmax_cross_entropy_with_logits softmax_cross_entropy_with_logits_v2 space_to_batch
        space_to_depth sparse_softmax_cross_entropy_with_logits sufficient_statistics
        weighted_cross_entropy_with_logits weighted_moments xw_plus_b""",
    "compat.v1.random": "multinomial poisson stateless_multinomial",
    "compat.v1.sparse": """
        add concat reduce_max reduce_max_sparse reduce_sum reduce_sum_sparse segment_mean
        segment_sqrt_n segment_sum split""",
    "compat.v1.strings": "length reduce_join split substr to_hash_bucket to_number",
    "keras.activations": """
        elu exponential gelu hard_sigmoid linear mish relu selu sigmoid softmax softplus softsign
        swish tanh""",
    "keras.backend": """
        abs all any argmax argmin batch_dot batch_flatten batch_normalization bias_add
        binary_crossentropy binary_focal_crossentropy cast categorical_crossentropy
        categorical_focal_crossentropy clip concatenate conv1d conv2d conv2d_transpose conv3d cos
        ctc_batch_cost ctc_decode ctc_label_dense_to_sparse cumprod cumsum depthwise_conv2d dot
        dropout elu equal exp expand_dims flatten gather greater greater_equal hard_sigmoid in_top_k
        l2_normalize less less_equal local_conv1d local_conv2d log max maximum mean min minimum
        not_equal one_hot ones_like permute_dimensions pool2d pool3d pow prod random_bernoulli
        random_binomial random_normal random_uniform relu repeat repeat_elements reshape
        resize_images resize_volumes reverse round separable_conv2d shape sigmoid sign sin softmax
        softplus softsign sparse_categorical_crossentropy spatial_2d_padding spatial_3d_padding sqrt
        square squeeze stack std stop_gradient sum tanh temporal_padding tile to_dense transpose
        truncated_normal var zeros_like""",
    "keras.losses": "categorical_hinge cosine_similarity huber log_cosh",
    "keras.metrics": """
        binary_accuracy binary_crossentropy binary_focal_crossentropy categorical_accuracy
        categorical_crossentropy categorical_focal_crossentropy hinge kl_divergence
        mean_absolute_error mean_absolute_percentage_error mean_squared_error
        mean_squared_logarithmic_error poisson sparse_categorical_accuracy
        sparse_categorical_crossentropy sparse_top_k_categorical_accuracy squared_hinge
        top_k_categorical_accuracy""",
}
"""Functions of `tf.` and `tf.keras.` by namespace, of several names of one the one that Keras 2 writes."""

GRAPH_FUNCTIONS = frozenset(
    f"{space}.{name}".lstrip(".") for space, names in _GRAPH_FUNCTIONS.items() for name in _names(names)
)
"""What Keras 2 keeps as a layer when a model applies it to a tensor (`TFOpLambda`)."""
