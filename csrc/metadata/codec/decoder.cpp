// The counterpart of encoder.cpp. Checks everything before use.
#include "metadata/codec/decoder.h"

#include "metadata/codec/byte_reader.h"
#include "metadata/codec/row_decoder.h"
#include "metadata/format/error.h"

namespace ldt::metadata {
namespace {

std::vector<int64_t> read_sizes(ByteReader& in) {
  std::vector<int64_t> shape(in.varint_up_to(kMaxDims, "the number of dimensions"));
  for (int64_t& size : shape) {
    size = static_cast<int64_t>(in.varint_up_to(INT64_MAX, "a size"));
  }
  return shape;
}

Hop read_hop(ByteReader& in, size_t number) {
  Hop hop(in.count("the number of a hop's tensors"));
  for (size_t index = 0; index < hop.size(); ++index) {
    HopTensor& tensor = hop[index];
    tensor.dtype = in.byte("a data type");
    const uint8_t flags = in.byte("a tensor's flags");
    if (flags > 7) fail("metadata message: expected a tensor's flags of 0 to 7, got ", int{flags});
    tensor.requires_grad = (flags & 1) != 0;
    tensor.shape = read_sizes(in);
    if ((flags & 2) != 0) {
      const uint8_t* order = in.take(tensor.shape.size(), "a memory order");
      tensor.order.assign(order, order + tensor.shape.size());
    }
    if ((flags & 4) != 0) tensor.shard = in.byte("a split dimension");
    with_title(title_of_hop(number, index), [&] { check_hop(tensor); });
  }
  return hop;
}

Form read_form(ByteReader& in) {
  Form form;
  form.name = in.byte("a tensor's name");
  form.dtype = in.byte("a data type");
  form.shape = read_sizes(in);
  with_title([] { return "metadata message"; }, [&] { check_form(form); });
  return form;
}

Call read_call(ByteReader& in, Kind kind) {
  Call call;
  call.kind = kind;
  if (kind == Kind::kCalledOff) {
    call.error_type = in.text("the error's type");
    call.error_text = in.text("the error's text");
    return call;
  }
  call.plan = in.text("the plan's digest");
  call.setting = in.text("the setting");
  const uint8_t has_autocast = in.byte("whether there is autocast");
  if (has_autocast > 1)
    fail("metadata message: expected 0 or 1 for autocast, got ", int{has_autocast});
  if (has_autocast == 1) call.autocast = in.text("the autocast state");
  return call;
}

// Appends them to `numbers`.
Part read_numbers(ByteReader& in, size_t of, const char* what, std::vector<uint32_t>& numbers) {
  const Part part{numbers.size(), in.count(what)};
  if (of == 0 && part.count != 0) {
    fail("metadata message: expected no ", what, ", got ", part.count);
  }
  for (size_t index = 0; index < part.count; ++index) {
    numbers.push_back(static_cast<uint32_t>(in.varint_up_to(of - 1, what)));
  }
  return part;
}

// Reads the microbatches and places their tensors in the buffer.
class MicrobatchReader {
 public:
  MicrobatchReader(ByteReader& in, Decoded& decoded, int64_t max_elements)
      : in_(in), decoded_(decoded), budget_(max_elements), rows_(in, decoded.plans, budget_) {}

  void read(size_t count) {
    int64_t before = -1;
    for (size_t index = 0; index < count; ++index) {
      Microbatch microbatch;
      microbatch.id = static_cast<int64_t>(static_cast<uint64_t>(before) +
                                           static_cast<uint64_t>(in_.signed_varint("an id")));
      before = microbatch.id;
      Content& content = decoded_.content;
      microbatch.hops =
          read_numbers(in_, content.hops.size(), "hops of a microbatch", content.hop_numbers);
      microbatch.forms =
          read_numbers(in_, content.forms.size(), "tensors of a microbatch", content.form_numbers);
      read_tensors(microbatch);
      content.microbatches.push_back(microbatch);
    }
  }

 private:
  void read_tensors(const Microbatch& microbatch) {
    rows_.start_microbatch();
    int name_before = -1;
    for (const uint32_t number : decoded_.content.forms_of(microbatch)) {
      const Form& form = decoded_.content.forms[number];
      if (form.name <= name_before) {
        fail("metadata message: expected each tensor of a microbatch once, in the order of names");
      }
      name_before = form.name;
      budget_.spend(form);
      const RowShape shape = rows_of(form);
      rows_.tensor(form, decoded_.bytes);
      decoded_.offsets.push_back(decoded_.bytes);
      const int64_t bytes = shape.rows * shape.length * kDTypes[form.dtype].bytes;
      decoded_.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }

  ByteReader& in_;
  Decoded& decoded_;
  ElementBudget budget_;
  RowDecoder rows_;
};

void read_body(ByteReader& in, Decoded& decoded, int64_t max_elements) {
  Content& content = decoded.content;
  const size_t hops = in.count("the number of hops");
  const size_t forms = in.count("the number of forms");
  const size_t microbatches = in.count("the number of microbatches");
  for (size_t number = 0; number < hops; ++number) content.hops.push_back(read_hop(in, number));
  for (size_t number = 0; number < forms; ++number) content.forms.push_back(read_form(in));
  MicrobatchReader(in, decoded, max_elements).read(microbatches);
}

Kind read_header(ByteReader& in) {
  for (const uint8_t letter : kMagic) {
    if (in.byte("the header") != letter) {
      fail(
          "expected a metadata message, which begins with LDTM, got something else; all ranks "
          "must make the same calls in the same order");
    }
  }
  const uint8_t version = in.byte("the version");
  if (version != kVersion) {
    fail("expected a metadata message of version ", int{kVersion}, ", got version ", int{version},
         "; install the same version of ldt on all ranks");
  }
  const uint8_t kind = in.byte("the kind");
  if (kind >= kKinds) {
    fail("metadata message: expected a kind below ", int{kKinds}, ", got ", int{kind},
         "; install the same version of ldt on all ranks");
  }
  const uint64_t length = in.varint("the length");
  if (length != in.remaining()) {
    fail("metadata message: its header says that ", length, " bytes follow, but ", in.remaining(),
         " do; the message is ", length > in.remaining() ? "cut short" : "followed by other bytes");
  }
  return static_cast<Kind>(kind);
}

}  // namespace

Decoded decode(const uint8_t* data, size_t size, int64_t max_elements) {
  ByteReader in(data, size);
  Decoded decoded;
  const Kind kind = read_header(in);
  decoded.content.call = read_call(in, kind);
  if (kind != Kind::kCalledOff) read_body(in, decoded, max_elements);
  if (in.remaining() != 0) {
    fail("metadata message: expected its end at byte ", in.offset(), ", but ", in.remaining(),
         " bytes follow; the message is damaged");
  }
  return decoded;
}

}  // namespace ldt::metadata
