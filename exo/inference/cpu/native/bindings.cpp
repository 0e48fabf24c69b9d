// What Python sees: pack weights, describe a model, run a step.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "file_guard.hpp"
#include "ggml.hpp"
#include "model.hpp"
#include "thread_pool.hpp"

namespace nb = nanobind;
using namespace exo;

void bind_layers(nb::module_& m);  // bindings_layers.cpp

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void need(int64_t got, int64_t expected, const char* what) {
  if (got != expected) {
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(got) +
                                " bytes, expected " + std::to_string(expected));
  }
}

MatrixPtr pack_affine_bytes(const Bytes& values, const Bytes& scales, const Bytes& offsets,
                            DType dtype, int64_t rows, int64_t cols, int bits, int group,
                            Table table) {
  if (group <= 0) throw std::invalid_argument("group " + std::to_string(group));
  const int64_t scale_bytes = rows * (cols / group) * size_of(dtype);
  need(static_cast<int64_t>(values.size()), rows * cols * bits / 8, "values");
  need(static_cast<int64_t>(scales.size()), scale_bytes, "scales");
  need(static_cast<int64_t>(offsets.size()), scale_bytes, "biases");
  const AffineSource source{values.data(), scales.data(), offsets.data(), dtype};
  nb::gil_scoped_release released;
  return pack_affine(source, rows, cols, {bits, table}, group);
}

MatrixPtr pack_dense_bytes(const Bytes& values, DType dtype, int64_t rows, int64_t cols) {
  need(static_cast<int64_t>(values.size()), rows * cols * size_of(dtype), "values");
  const DenseSource source{values.data(), dtype, cols, 1};
  nb::gil_scoped_release released;
  return pack_dense(source, rows, cols);
}

// Rows are columns of `values` [cols, width]: the one at `first`, and each `step` ones after it.
MatrixPtr pack_columns_bytes(const Bytes& values, DType dtype, int64_t width, int64_t first,
                             int64_t step, int64_t rows, int64_t cols) {
  need(static_cast<int64_t>(values.size()), width * cols * size_of(dtype), "values");
  if (first < 0 || step < 1 || rows < 1 || first + (rows - 1) * step >= width) {
    throw std::invalid_argument("columns that are not there");
  }
  const DenseSource source{values.data() + first * size_of(dtype), dtype, step, width};
  nb::gil_scoped_release released;
  return pack_dense(source, rows, cols);
}

MatrixPtr pack_float8_bytes(const Bytes& values, const Floats& scales, int64_t rows, int64_t cols,
                            int group) {
  need(static_cast<int64_t>(values.size()), rows * cols, "values");
  const int64_t groups = group > 0 ? (cols + group - 1) / group : 0;
  need(static_cast<int64_t>(scales.size()) * 4, rows * groups * 4, "scales");
  nb::gil_scoped_release released;
  return pack_float8(values.data(), scales.data(), rows, cols, group);
}

MatrixPtr pack_float4_bytes(const Bytes& values, const Bytes& scales, float scale, int64_t rows,
                            int64_t cols) {
  need(static_cast<int64_t>(values.size()), rows * cols / 2, "values");
  need(static_cast<int64_t>(scales.size()), rows * (cols / kFloat4Cols), "scales");
  nb::gil_scoped_release released;
  return pack_float4(values.data(), scales.data(), scale, rows, cols);
}

MatrixPtr pack_ggml_bytes(const Bytes& values, const std::string& format, int64_t rows,
                          int64_t cols) {
  for (const GgmlFormat& known : ggml_formats()) {
    if (known.name == format) {
      need(static_cast<int64_t>(values.size()), rows * (cols / known.cols) * known.bytes, "values");
    }
  }
  const uint8_t* data = values.data();
  nb::gil_scoped_release released;
  return pack_ggml(data, format, rows, cols);
}

void set_bias(Matrix& matrix, std::vector<float> bias) {
  if (static_cast<int64_t>(bias.size()) != matrix.rows) throw std::invalid_argument("bias size");
  bias.resize(static_cast<size_t>(matrix.blocks() * kBlockRows));
  matrix.bias = std::move(bias);
}

// An array that owns what it shows.
nb::ndarray<nb::numpy, float> as_array(std::vector<float>&& values, size_t rows, size_t cols) {
  auto* kept = new std::vector<float>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return {kept->data(), {rows, cols}, owner};
}

nb::ndarray<nb::numpy, float> apply(const Matrix& matrix, const Floats& x, bool precise) {
  const int64_t rows = static_cast<int64_t>(x.shape(0));
  if (static_cast<int64_t>(x.shape(1)) != matrix.cols) throw std::invalid_argument("columns of x");
  std::vector<float> out(static_cast<size_t>(rows * matrix.rows));
  const float* data = x.data();
  {
    nb::gil_scoped_release released;
    Activations activations;
    activations.resize(rows, matrix.cols, {activation_group(matrix, precise)});
    std::copy(data, data + rows * matrix.cols, activations.row(0));
    activations.quantize(0, rows);
    run_linear({{&matrix, &activations, 0, rows, out.data(), matrix.rows}}, precise);
  }
  return as_array(std::move(out), static_cast<size_t>(rows), static_cast<size_t>(matrix.rows));
}

nb::ndarray<nb::numpy, float> read_rows(const Matrix& matrix, const Tokens& rows) {
  std::vector<float> out(rows.size() * static_cast<size_t>(matrix.cols));
  for (size_t i = 0; i < rows.size(); i++) {
    if (rows.data()[i] < 0 || rows.data()[i] >= matrix.rows) throw std::out_of_range("row");
    matrix.read_row(rows.data()[i], out.data() + i * static_cast<size_t>(matrix.cols));
  }
  return as_array(std::move(out), rows.size(), static_cast<size_t>(matrix.cols));
}

nb::ndarray<nb::numpy, float> turned(const Hadamard& hadamard, const Floats& rows) {
  const size_t count = rows.shape(0), cols = rows.shape(1);
  std::vector<float> out(rows.data(), rows.data() + count * cols);
  for (size_t i = 0; i < count; i++)
    hadamard.turn(out.data() + i * cols, static_cast<int64_t>(cols));
  return as_array(std::move(out), count, cols);
}

uint64_t read_all_bytes(const Bytes& values) {
  const uint8_t* data = values.data();
  const int64_t size = static_cast<int64_t>(values.size());
  nb::gil_scoped_release released;
  return read_all(data, size);
}

nb::ndarray<nb::numpy, float> forward(Model& model, const std::vector<Slice>& slices,
                                      const Tokens& tokens, const nb::object& hidden) {
  int64_t rows = 0, wanted = 0;
  for (const Slice& slice : slices) {
    rows += slice.length;
    wanted += slice.logits;
  }
  if (static_cast<int64_t>(tokens.size()) != rows)
    throw std::invalid_argument("tokens of the step");
  const float* input = nullptr;
  Floats array;
  if (!hidden.is_none()) {
    array = nb::cast<Floats>(hidden);
    if (static_cast<int64_t>(array.shape(0)) != rows ||
        static_cast<int64_t>(array.shape(1)) != model.width()) {
      throw std::invalid_argument("shape of the hidden states");
    }
    input = array.data();
  } else if (!model.embedding) {
    throw std::invalid_argument("a later shard needs hidden states");
  }
  const int64_t out_rows = model.head ? wanted : rows;
  const int64_t width = model.head ? model.head->rows : model.width();
  std::vector<float> out(static_cast<size_t>(out_rows * width));
  {
    nb::gil_scoped_release released;
    model.forward(slices, tokens.data(), input, out.data());
  }
  return as_array(std::move(out), static_cast<size_t>(out_rows), static_cast<size_t>(width));
}

nb::ndarray<nb::numpy, float> final_states(const Model& model) {
  std::vector<float> out(static_cast<size_t>(model.rows() * model.spec().hidden));
  {
    nb::gil_scoped_release released;
    model.final_states(out.data());
  }
  return as_array(std::move(out), static_cast<size_t>(model.rows()),
                  static_cast<size_t>(model.spec().hidden));
}

}  // namespace

NB_MODULE(_native, m) {
  nb::exception<CacheMissError>(m, "CacheMissError");
  nb::exception<CacheFullError>(m, "CacheFullError");

  nb::enum_<DType>(m, "DType")
      .value("F32", DType::kFloat32)
      .value("F16", DType::kFloat16)
      .value("BF16", DType::kBFloat16);
  nb::enum_<Table>(m, "Table")
      .value("NONE", Table::kNone)
      .value("IQ4", Table::kIq4)
      .value("E2M1", Table::kE2m1);
  nb::enum_<Activation>(m, "Activation")
      .value("SILU", Activation::kSilu)
      .value("GELU_TANH", Activation::kGeluTanh)
      .value("GELU", Activation::kGelu)
      .value("CLAMPED_SWIGLU", Activation::kClampedSwiglu)
      .value("SIGMOID", Activation::kSigmoid)
      .value("RELU2", Activation::kRelu2);
  nb::enum_<Routing>(m, "Routing")
      .value("SOFTMAX_THEN_TOP", Routing::kSoftmaxThenTop)
      .value("SOFTMAX_THEN_TOP_SUMMED_1", Routing::kSoftmaxThenTopSummed1)
      .value("TOP_THEN_SOFTMAX", Routing::kTopThenSoftmax)
      .value("TOP_THEN_SIGMOID", Routing::kTopThenSigmoid)
      .value("SIGMOID", Routing::kSigmoid)
      .value("SIGMOID_SUMMED_1", Routing::kSigmoidSummed1)
      .value("ROOT_SOFTPLUS_SUMMED_1", Routing::kRootSoftplusSummed1)
      .value("SPARSE_MIXER", Routing::kSparseMixer);

  nb::class_<Matrix>(m, "Matrix")
      .def_ro("rows", &Matrix::rows)
      .def_ro("cols", &Matrix::cols)
      .def_prop_ro("nbytes", [](const Matrix& w) { return w.data.bytes(); })
      .def("set_bias", &set_bias, nb::arg("bias"))
      .def("apply", &apply, nb::arg("x"), nb::arg("precise") = false)
      .def("read_rows", &read_rows, nb::arg("rows"));
  m.def("pack_affine", &pack_affine_bytes, nb::arg("values"), nb::arg("scales"), nb::arg("biases"),
        nb::arg("dtype"), nb::arg("rows"), nb::arg("cols"), nb::arg("bits"), nb::arg("group"),
        nb::arg("table") = Table::kNone);
  m.def("pack_dense", &pack_dense_bytes, nb::arg("values"), nb::arg("dtype"), nb::arg("rows"),
        nb::arg("cols"));
  m.def("pack_columns", &pack_columns_bytes, nb::arg("values"), nb::arg("dtype"), nb::arg("width"),
        nb::arg("first"), nb::arg("step"), nb::arg("rows"), nb::arg("cols"));
  m.def(
      "guard_map",
      [](const Bytes& map) { return guard_map(map.data(), static_cast<int64_t>(map.size())); },
      nb::arg("map"));
  m.def("lost_pages", &lost_pages, nb::arg("guard"));
  m.def("unguard_map", &unguard_map, nb::arg("guard"));

  m.def("pack_float8", &pack_float8_bytes, nb::arg("values"), nb::arg("scales"), nb::arg("rows"),
        nb::arg("cols"), nb::arg("group"));
  m.def("pack_float4", &pack_float4_bytes, nb::arg("values"), nb::arg("scales"), nb::arg("scale"),
        nb::arg("rows"), nb::arg("cols"));
  m.def("pack_ggml", &pack_ggml_bytes, nb::arg("values"), nb::arg("format"), nb::arg("rows"),
        nb::arg("cols"));
  nb::enum_<Grid>(m, "Grid")
      .value("IQ2_XXS", Grid::kIq2Xxs)
      .value("IQ2_XS", Grid::kIq2Xs)
      .value("IQ2_S", Grid::kIq2S)
      .value("IQ3_XXS", Grid::kIq3Xxs)
      .value("IQ3_S", Grid::kIq3S)
      .value("IQ1_S", Grid::kIq1);
  m.def(
      "set_grid",
      [](Grid grid, const Bytes& places) {
        set_grid(grid, {places.data(), places.data() + places.size()});
      },
      nb::arg("grid"), nb::arg("places"));
  m.def("ggml_formats", [] {
    nb::dict found;  // name: (columns, bytes) of a block
    for (const GgmlFormat& f : ggml_formats())
      found[f.name.c_str()] = nb::make_tuple(f.cols, f.bytes);
    return found;
  });

  bind_layers(m);
  nb::class_<Spec>(m, "Spec")
      .def(nb::init<>())
      .def_rw("hidden", &Spec::hidden)
      .def_rw("heads", &Spec::heads)
      .def_rw("kv_heads", &Spec::kv_heads)
      .def_rw("head_dim", &Spec::head_dim)
      .def_rw("layer_norm", &Spec::layer_norm)
      .def_rw("norm_eps", &Spec::norm_eps)
      .def_rw("after_norm_eps", &Spec::after_norm_eps)
      .def_rw("attention_scale", &Spec::attention_scale)
      .def_rw("attention_soft_cap", &Spec::attention_soft_cap)
      .def_rw("activation", &Spec::activation)
      .def_rw("embedding_scale", &Spec::embedding_scale)
      .def_rw("residual_scale", &Spec::residual_scale)
      .def_rw("logits_scale", &Spec::logits_scale)
      .def_rw("logits_soft_cap", &Spec::logits_soft_cap)
      .def_rw("experts_per_token", &Spec::experts_per_token)
      .def_rw("routing", &Spec::routing)
      .def_rw("expert_scale", &Spec::expert_scale)
      .def_rw("expert_band", &Spec::expert_band)
      .def_rw("weighs_inputs", &Spec::weighs_inputs)
      .def_rw("limits_inputs", &Spec::limits_inputs)
      .def_rw("streams", &Spec::streams)
      .def_rw("sinkhorn_rounds", &Spec::sinkhorn_rounds)
      .def_rw("stream_eps", &Spec::stream_eps)
      .def_rw("stream_magnitude", &Spec::stream_magnitude)
      .def_rw("stream_least", &Spec::stream_least)
      .def_rw("expert_groups", &Spec::expert_groups)
      .def_rw("groups_per_token", &Spec::groups_per_token)
      .def_rw("judged_per_group", &Spec::judged_per_group)
      .def_rw("precise", &Spec::precise)
      .def_rw("kv_bits", &Spec::kv_bits)
      .def_rw("cache_limit_bytes", &Spec::cache_limit_bytes);
  nb::class_<Slice>(m, "Slice")
      .def(nb::init<std::string, int64_t, int64_t, int64_t, bool>(), nb::arg("sequence"),
           nb::arg("start"), nb::arg("length"), nb::arg("logits"), nb::arg("keeps") = false);
  nb::class_<Hadamard>(m, "Hadamard")
      .def(nb::init<int64_t, std::map<int64_t, std::vector<float>>>(), nb::arg("block"),
           nb::arg("signs"))
      .def("turned", &turned, nb::arg("rows"));
  nb::class_<Model>(m, "Model")
      .def(nb::init<const Spec&>(), nb::arg("spec"))
      .def_rw("layers", &Model::layers)
      .def_rw("ropes", &Model::ropes)
      .def_rw("embedding", &Model::embedding)
      .def_rw("head", &Model::head)
      .def_rw("token_inputs", &Model::token_inputs)
      .def_rw("streams", &Model::streams)
      .def_rw("last_streams", &Model::last_streams)
      .def_rw("embedding_norm", &Model::embedding_norm)
      .def_rw("final_norm", &Model::final_norm)
      .def_rw("final_norm_bias", &Model::final_norm_bias)
      .def_rw("norm_every", &Model::norm_every)
      .def("set_hadamard", &Model::set_hadamard, nb::arg("hadamard"), nb::arg("embedding"))
      .def("check_sizes", &Model::check_sizes)
      .def("forward", &forward, nb::arg("slices"), nb::arg("tokens"), nb::arg("hidden").none())
      .def("final_states", &final_states)
      .def("release", &Model::release, nb::arg("sequence"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("take_over", &Model::take_over, nb::arg("sequence"), nb::arg("source"),
           nb::arg("tokens"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("page_bytes", &Model::page_bytes)
      .def_prop_ro("state_bytes", &Model::state_bytes)
      .def_prop_ro("cache_limit_bytes",
                   [](const Model& model) { return model.spec().cache_limit_bytes; })
      .def_prop_ro("sequences", &Model::sequences)
      .def_prop_ro("states", &Model::states)
      .def_prop_ro("cache_pages", &Model::cache_pages)
      .def_prop_ro("cache_bytes", &Model::cache_bytes);

  m.attr("PAGE_TOKENS") = kPageTokens;
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("isas", &runnable_kernels);
  m.def("choose_isa", &choose_kernels, nb::arg("name"));
  m.def(
      "set_threads", [](int count) { thread_pool().set_threads(count); }, nb::arg("count"),
      nb::call_guard<nb::gil_scoped_release>());
  m.def("threads", [] { return thread_pool().threads(); });
  m.def("read_all", &read_all_bytes, nb::arg("values"));
}
