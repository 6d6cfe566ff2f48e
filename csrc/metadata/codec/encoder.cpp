// Writes the header, the tables of hops and forms, and the microbatches, in this order.
#include "metadata/codec/encoder.h"

#include <algorithm>

#include "metadata/codec/row_encoder.h"
#include "metadata/format/error.h"

namespace ldt::metadata {
namespace {

void write_sizes(ByteWriter& out, const std::vector<int64_t>& shape) {
  out.varint(shape.size());
  for (const int64_t size : shape) out.varint(static_cast<uint64_t>(size));
}

void write_hop(ByteWriter& out, const Hop& hop, size_t number) {
  out.varint(hop.size());
  for (size_t index = 0; index < hop.size(); ++index) {
    const HopTensor& tensor = hop[index];
    with_title(title_of_hop(number, index), [&] { check_hop(tensor); });
    out.byte(tensor.dtype);
    out.byte(static_cast<uint8_t>((tensor.requires_grad ? 1 : 0) | (tensor.order.empty() ? 0 : 2) |
                                  (tensor.shard ? 4 : 0)));
    write_sizes(out, tensor.shape);
    for (const uint8_t dim : tensor.order) out.byte(dim);
    if (tensor.shard) out.byte(*tensor.shard);
  }
}

void write_rows(RowEncoder& encoder, const Form& form, size_t tensor, RowFactsSource& rows) {
  const RowShape shape = rows_of(form);
  for (int64_t row = 0; row < shape.rows; ++row) {
    if (form.name == kAttentionMask) {
      encoder.mask(rows.mask(tensor, row), shape.length, rows);
    } else {
      encoder.rule(rows.rule(tensor, row), shape.length, rows);
    }
  }
}

void write_call(ByteWriter& out, const Call& call) {
  if (call.kind == Kind::kCalledOff) {
    out.text(call.error_type);
    out.text(call.error_text);
    return;
  }
  out.text(call.plan);
  out.text(call.setting);
  out.byte(call.autocast ? 1 : 0);
  if (call.autocast) out.text(*call.autocast);
}

void check_names(const Content& content, const Microbatch& microbatch) {
  int before = -1;
  for (const uint32_t form : content.forms_of(microbatch)) {
    const int name = content.forms[form].name;
    if (name <= before) {
      fail("microbatch ", microbatch.id, ": expected each tensor once, in the order of the names");
    }
    before = name;
  }
}

void write_body(ByteWriter& out, const Content& content, RowFactsSource& rows) {
  out.varint(content.hops.size());
  out.varint(content.forms.size());
  out.varint(content.microbatches.size());
  for (size_t number = 0; number < content.hops.size(); ++number) {
    write_hop(out, content.hops[number], number);
  }
  for (const Form& form : content.forms) {
    out.byte(form.name);
    out.byte(form.dtype);
    write_sizes(out, form.shape);
  }
  RowEncoder encoder(out);
  size_t tensor = 0;
  int64_t before = -1;
  for (const Microbatch& microbatch : content.microbatches) {
    check_names(content, microbatch);
    out.signed_varint(
        static_cast<int64_t>(static_cast<uint64_t>(microbatch.id) - static_cast<uint64_t>(before)));
    before = microbatch.id;
    out.varint(microbatch.hops.count);
    for (const uint32_t hop : content.hops_of(microbatch)) out.varint(hop);
    out.varint(microbatch.forms.count);
    for (const uint32_t form : content.forms_of(microbatch)) out.varint(form);
    for (const uint32_t form : content.forms_of(microbatch)) {
      write_rows(encoder, content.forms[form], tensor++, rows);
    }
  }
}

}  // namespace

std::vector<uint8_t> encode(const Content& content, RowFactsSource& rows, int64_t max_elements) {
  ElementBudget budget(max_elements);
  for (const Form& form : content.forms) check_form(form);
  for (const uint32_t form : content.form_numbers) budget.spend(content.forms[form]);
  ByteWriter body;
  write_call(body, content.call);
  if (content.call.kind != Kind::kCalledOff) write_body(body, content, rows);

  ByteWriter message;
  for (const uint8_t letter : kMagic) message.byte(letter);
  message.byte(kVersion);
  message.byte(static_cast<uint8_t>(content.call.kind));
  message.varint(body.size());
  message.append(body.bytes());
  return message.bytes();
}

}  // namespace ldt::metadata
